"""Compiles the CPU kernels of `engine/csrc/` into one library, and keeps it in a cache.

    python -m engine.native.build                            # into the cache
    python -m engine.native.build --into engine/native/lib   # into the package, to be shipped

`kernels.cpp` is compiled once for each instruction set: for the cache for those that this processor
has, to be shipped for all that the compiler knows. The library chooses among them when it runs, so
one that is shipped fits every processor of this architecture that has the first set.
"""

from __future__ import annotations

import argparse
import logging
import os
import shutil
import sys
import sysconfig
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from engine.native.cache import CacheEntry, cache_folder, unwritable
from engine.native.commands import Command, CommandFailed, run_commands
from engine.native.compiler import (
    BINDING_FLAGS,
    ISA_FLAGS,
    KERNEL_FLAGS,
    LINK_FLAGS,
    Compiler,
    check_openmp,
    find_compiler,
)
from engine.native.errors import BuildError, NoCompilerError
from engine.native.key import (
    MODULE,
    Torch,
    installed_torch,
    library_stem,
    source_files,
    tool_key,
)
from engine.native.machine import instruction_sets, unsuitable_platform
from engine.native.progress import Progress

logger = logging.getLogger(__name__)

SOURCE_DIR = Path(__file__).resolve().parents[1] / "csrc"
BINDINGS = "bindings.cpp"
"""The one source that includes torch's headers; it is compiled once."""
LIMIT_S = 600.0
"""A build that takes longer is killed."""
_RETRY = "run `python -m engine.native.build` to try again"
_TAIL_LINES = 40


def build(source_dir: Path = SOURCE_DIR, *, retry: bool = False, for_all: bool = False) -> Path:
    """The library's file in the cache, compiled first if it isn't there: for this processor, or
    `for_all`.

    Raises `BuildError`. A build that has failed within the last hour isn't tried again, unless
    `retry` says so.
    """
    torch = installed_torch()
    compiler = find_compiler()
    wanted = list(ISA_FLAGS) if for_all else instruction_sets(ISA_FLAGS)
    entry = cache_entry(library_stem(source_dir, torch), compiler, wanted)
    if entry.library.is_file():
        return entry.library
    _check_tools(compiler, torch)
    entry.make_folder()
    try:
        with entry.locked():
            failure = None if retry else entry.failure()
            if failure is not None:
                raise failure
            if not entry.library.is_file():
                _build_noting(entry, compiler, torch, source_dir, wanted)
    except OSError as error:
        raise unwritable(entry.folder, error) from error
    return entry.library


def build_into(folder: Path, source_dir: Path = SOURCE_DIR) -> Path:
    """The library's file in `folder`, under the name by which it is shipped; libraries of other
    versions there are removed. Raises `BuildError`."""
    built = build(source_dir, retry=True, for_all=True)
    target = folder / f"{library_stem(source_dir, installed_torch())}.so"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder) as made:
            shutil.copyfile(built, Path(made, target.name))
            os.replace(Path(made, target.name), target)
        for other in folder.glob(f"{MODULE}-*.so"):
            if other != target:
                other.unlink()
    except OSError as error:
        raise BuildError(f"{folder} can't be written ({error})", "name another folder") from error
    return target


def cache_entry(stem: str, compiler: Compiler, wanted: Sequence[str] | None = None) -> CacheEntry:
    """The place in the cache of the library that `compiler` makes for the `wanted` instruction
    sets, by default this processor's. Raises `BuildError`."""
    sets = instruction_sets(ISA_FLAGS) if wanted is None else wanted
    return CacheEntry(cache_folder(), f"{stem}-{tool_key(compiler, sets)}")


def _check_tools(compiler: Compiler, torch: Torch) -> None:
    """Find out quickly what else is missing; such failures needn't be remembered."""
    check_openmp(compiler, torch.folder)
    if not (_python_headers() / "Python.h").is_file():
        raise BuildError(
            f"Python's headers are not in {_python_headers()}",
            "install python3-dev (Debian, Ubuntu) or python3-devel, then restart",
        )


def _build_noting(
    entry: CacheEntry, compiler: Compiler, torch: Torch, source_dir: Path, wanted: Sequence[str]
) -> None:
    with entry.work_folder() as folder:
        try:
            entry.store(_compile(compiler, torch, source_dir, folder, wanted))
        except BuildError as error:
            entry.note_failure(error)
            raise
        except CommandFailed as failed:
            problem = _explain(failed, compiler, entry)
            entry.note_failure(problem)
            raise problem from failed
        finally:
            _keep_output(folder, entry.log)


def _compile(
    compiler: Compiler, torch: Torch, source_dir: Path, folder: Path, wanted: Sequence[str]
) -> Path:
    """Compile and link in `folder`. Raises `BuildError` and `CommandFailed`."""
    deadline = time.monotonic() + LIMIT_S
    known = compiler.instruction_sets(folder, wanted)
    commands = _compilations(compiler, torch, source_dir, folder, known)
    progress = Progress(str(compiler), len(commands))
    result = "couldn't build"
    try:
        cores = len(os.sched_getaffinity(0))
        run_commands(commands, cores, deadline, progress.update)
        library = folder / f"{MODULE}.so"
        objects = sorted(str(command.output.with_suffix(".o")) for command in commands)
        words = (*compiler.command, *objects, "-o", str(library), f"-L{torch.folder / 'lib'}")
        link = Command("the library", (*words, *LINK_FLAGS), folder / "library.txt")
        run_commands([link], 1, deadline, lambda done: progress.update(len(commands)))
        result = "built"
    finally:
        progress.end(result)
    return library


def _compilations(
    compiler: Compiler, torch: Torch, source_dir: Path, folder: Path, known: list[str]
) -> list[Command]:
    """The longest, which is that of the bindings, first."""

    def command(source: Path, suffix: str, flags: Sequence[str]) -> Command:
        name = f"{source.stem}{suffix}"
        # Messages of the library name its sources, but not where they were compiled.
        places = f"-ffile-prefix-map={source_dir}=csrc", f"-ffile-prefix-map={torch.folder}=torch"
        ends = "-c", str(source), "-o", str(folder / f"{name}.o")
        words = (*compiler.command, *flags, *places, *ends)
        return Command(name, words, folder / f"{name}.txt")

    left_out = [isa for isa in ISA_FLAGS if isa not in known]
    without = [f"-DMANTA_WITHOUT_{isa.upper()}" for isa in left_out]
    bindings = [*BINDING_FLAGS, *_torch_flags(), f"-isystem{_python_headers()}", *without]
    commands = [command(source_dir / BINDINGS, "", bindings)]
    for source in source_files(source_dir):
        if source.suffix == ".cpp" and source.name != BINDINGS:
            for isa in known:
                flags = [*KERNEL_FLAGS, *ISA_FLAGS[isa], f"-DMANTA_ISA={isa}"]
                commands.append(command(source, f".{isa}", flags))
    return commands


def _torch_flags() -> list[str]:
    import torch
    from torch.utils.cpp_extension import include_paths

    abi = f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}"
    return [abi, *(f"-isystem{path}" for path in include_paths())]


def _python_headers() -> Path:
    return Path(sysconfig.get_path("include"))


def _explain(failed: CommandFailed, compiler: Compiler, entry: CacheEntry) -> BuildError:
    output = failed.command.output.read_text(errors="replace")
    logger.debug("%s:\n%s", failed.command.title, "\n".join(output.splitlines()[-_TAIL_LINES:]))
    if failed.timed_out:
        return BuildError(f"the build took longer than {LIMIT_S / 60:.0f} minutes", _RETRY)
    cause = f"{compiler} failed on {failed.command.title}"
    return BuildError(cause, f"look into {entry.log}, then {_RETRY}")


def _keep_output(folder: Path, log: Path) -> None:
    """Write what the compiler printed to `log`."""
    files = sorted(folder.glob("*.txt"))
    parts = [f"--- {file.stem}\n{file.read_text(errors='replace')}" for file in files]
    with suppress(OSError):
        log.write_text("\n".join(parts))


def main(argv: Sequence[str] | None = None, source_dir: Path = SOURCE_DIR) -> int:
    """Exit status: 0, also where no library can be made for lack of a compiler or on another
    platform; 1 if the build failed, or `--into` has no compiler; 130 after Ctrl-C."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--into", type=Path, metavar="FOLDER", help="instead of the cache")
    options = parser.parse_args(argv)
    if why := unsuitable_platform():
        print(f"no CPU kernels: {why}")
        return 0
    try:
        if options.into is not None:
            built = build_into(options.into, source_dir)
        else:
            built = build(source_dir, retry=True)
    except BuildError as error:
        print(f"no CPU kernels: {error}")
        return 0 if isinstance(error, NoCompilerError) and options.into is None else 1
    except KeyboardInterrupt:
        return 130
    print(f"CPU kernels: {built}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
