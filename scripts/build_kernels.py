"""Compile the FlashInfer kernels that Manta uses, without a GPU, for machines without a compiler.

    python scripts/build_kernels.py --out build/aot --head-dim 64 128 --dtype bfloat16 float16
    python scripts/build_kernels.py --install build/aot     # into this environment's flashinfer

It needs flashinfer-python, ninja, nvcc (`CUDA_HOME`) and the headers of cuRAND and (for `norm`)
cuBLAS. A bare CUDA toolkit may lack the headers: `pip install --no-deps --target DIR nvidia-curand
nvidia-cublas` and `--include DIR/nvidia/cu13/include`. Modules in `--out` aren't built again.
Before FlashInfer compiles a module, it looks for it at `<flashinfer>/data/aot/<name>/<name>.so`;
this script writes that layout, and beside it for which GPUs the modules are. With
FLASHINFER_DISABLE_JIT=1 a missing module is an error and isn't compiled.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import platform
import resource
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from engine.device import flashinfer_modules


@dataclass
class BuiltModule:
    """One shared library. `cpu_s`: CPU time of all compiler processes; `error`: the first error."""

    name: str
    cpu_s: float
    size_bytes: int
    error: str | None = None


def main(argv: list[str] | None = None) -> int:
    """Exit status: 0, or 1 if a module didn't compile."""
    options = _parse(argv)
    if options.install is not None:
        return _install(options.install)
    out: Path = options.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    _set_environment(options, out)
    built: dict[str, BuiltModule] = {}
    if options.json is not None and options.json.exists():
        for entry in json.loads(options.json.read_text())["modules"]:
            built[entry["name"]] = BuiltModule(
                **{field.name: entry[field.name] for field in fields(BuiltModule)}
            )
    failed = False
    for spec in _specs(options):
        if (out / spec.name / f"{spec.name}.so").exists():
            print(f"{spec.name}: there already")
            continue
        started = time.monotonic()
        module = _build(spec, out)
        built[module.name] = module
        failed |= module.error is not None
        state = module.error or f"{module.size_bytes / 1e6:.2f} MB"
        wall_s = time.monotonic() - started
        print(f"{module.name}: {wall_s:.0f} s, {module.cpu_s:.0f} s of CPU, {state}", flush=True)
        if options.json is not None:
            options.json.write_text(_report(options, list(built.values())))
    flashinfer_modules.write_manifest(out, options.arch)
    return int(failed)


def _parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument(
        "--out", type=Path, default=Path("build/aot"), help="folder for the modules"
    )
    parser.add_argument("--install", type=Path, metavar="DIR", help="only copy DIR to flashinfer")
    parser.add_argument(
        "--arch", nargs="+", default=["9.0a"], help="compute capabilities, e.g. 8.0 9.0a"
    )
    parser.add_argument("--dtype", nargs="+", default=["bfloat16"], help="of the model")
    parser.add_argument("--head-dim", nargs="+", type=int, default=[128])
    parser.add_argument("--fp8", action="store_true", help="for kv_cache_dtype fp8_e4m3 too")
    parser.add_argument("--windows", action="store_true", help="for sliding windows too")
    parser.add_argument("--fa3", action="store_true", help="Hopper's prefill kernels too")
    parser.add_argument("--only-attention", action="store_true", help="no norm, rope ...")
    parser.add_argument("--include", nargs="*", type=Path, default=[], help="header folders")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--json", type=Path, help="write times and sizes here")
    return parser.parse_args(argv)


def _set_environment(options: argparse.Namespace, out: Path) -> None:
    """Set what flashinfer reads when it is imported, and nvcc and the linker when they run."""
    work = out.parent / f"{out.name}-work"
    os.environ["FLASHINFER_CUDA_ARCH_LIST"] = " ".join(options.arch)
    os.environ["FLASHINFER_WORKSPACE_BASE"] = str(work)
    os.environ["FLASHINFER_USE_CUDA_NORM"] = "1"
    os.environ["MAX_JOBS"] = str(options.jobs)
    flags = [f"-I{folder.resolve()}" for folder in options.include]
    if extra := os.environ.get("FLASHINFER_EXTRA_CUDAFLAGS"):
        flags.append(extra)
    if flags:
        os.environ["FLASHINFER_EXTRA_CUDAFLAGS"] = " ".join(flags)
    # The modules need libcuda.so.1, which comes with the driver; an empty one is enough to link.
    stub = work / "stub"
    stub.mkdir(parents=True, exist_ok=True)
    (stub / "empty.c").write_text("")
    subprocess.run(
        ["cc", "-shared", "-fPIC", "-Wl,-soname,libcuda.so.1", "-o", "libcuda.so", "empty.c"],
        cwd=stub,
        check=True,
    )
    paths = [str(stub), *filter(None, [os.environ.get("LIBRARY_PATH")])]
    os.environ["LIBRARY_PATH"] = os.pathsep.join(paths)


def _specs(options: argparse.Namespace) -> Iterator[Any]:
    """The modules that the wrappers and functions called by Manta will load."""
    import torch
    from flashinfer.jit.page import gen_page_module

    fp8 = torch.float8_e4m3fn
    windows = (False, True) if options.windows else (False,)
    for head_dim, name, window in itertools.product(options.head_dim, options.dtype, windows):
        dtype = getattr(torch, name)
        for kv_dtype in (dtype, fp8) if options.fp8 else (dtype,):
            sizes = (dtype, kv_dtype, head_dim, window)
            yield from flashinfer_modules.prefill_modules(*sizes, fa3=False)
            yield from flashinfer_modules.decode_modules(*sizes)
        if options.fa3:
            yield from flashinfer_modules.prefill_modules(dtype, dtype, head_dim, window, fa3=True)
    if not options.only_attention:
        yield from flashinfer_modules.operator_modules()
        yield gen_page_module()


def _build(spec: Any, out: Path) -> BuiltModule:
    cpu_before = _children_cpu_s()
    error, size = None, 0
    try:
        spec.build(verbose=False)
        target = out / spec.name / f"{spec.name}.so"
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(spec.jit_library_path, target)
        size = target.stat().st_size
    except (RuntimeError, subprocess.CalledProcessError) as failure:
        error = _first_error(str(failure))
    return BuiltModule(spec.name, round(_children_cpu_s() - cpu_before, 1), size, error)


def _children_cpu_s() -> float:
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def _first_error(text: str) -> str:
    """The compiler's first error, without the folders of this machine."""
    lines = [line for line in text.splitlines() if "error" in line.lower()] or ["did not build"]
    words = (word.rsplit("/", 1)[-1] if word.startswith("/") else word for word in lines[0].split())
    return " ".join(words)[:300]


def _report(options: argparse.Namespace, modules: list[BuiltModule]) -> str:
    import flashinfer
    import torch

    # Imported here: the image's stage `flashinfer` has neither benchmarks/ nor deploy/.
    from benchmarks.common import environment

    nvcc = Path(os.environ.get("CUDA_HOME", "/usr/local/cuda")) / "bin" / "nvcc"
    text = subprocess.run([str(nvcc), "--version"], capture_output=True, text=True, check=True)
    release = next(line for line in text.stdout.splitlines() if "release" in line)
    machine = environment()
    content = {
        **{name: machine[name] for name in ("cpu", "cores", "commit", "dirty", "date")},
        "flashinfer": flashinfer.__version__,
        "torch": torch.__version__,
        "nvcc": release.rsplit(" ", 1)[-1],
        "python": platform.python_version(),
        "arch": " ".join(options.arch),
        "jobs": options.jobs,
        "modules": [asdict(module) for module in modules],
    }
    return json.dumps(content, indent=1) + "\n"


def _install(source: Path) -> int:
    import flashinfer

    target = Path(flashinfer.__file__).parent / "data" / "aot"
    shutil.copytree(source, target, dirs_exist_ok=True)
    print(f"{len(list(target.glob('*/*.so')))} modules in {target}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
