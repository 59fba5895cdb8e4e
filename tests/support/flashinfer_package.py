"""A package `flashinfer` on disk, as far as modules are named, looked for and built.

Names are those of flashinfer-python 0.7.2.post1. `test_flashinfer_signatures.py` compares them
where that is installed. Building a module writes an empty file.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

_SPEC = """
import os
from pathlib import Path

PACKAGE = Path(__file__).parent

class Spec:
    def __init__(self, name):
        self.name = name
        base = os.environ.get("FLASHINFER_WORKSPACE_BASE", str(Path.home()))
        self.jit_library_path = Path(base) / "cached_ops" / name / f"{name}.so"

    @property
    def aot_artifacts(self):
        path = PACKAGE / "data" / "aot" / self.name / f"{self.name}.so"
        return (path,) if path.exists() else ()

    def build(self, verbose):
        assert os.environ["FLASHINFER_CUDA_ARCH_LIST"]
        self.jit_library_path.parent.mkdir(parents=True, exist_ok=True)
        self.jit_library_path.write_bytes(b"")
"""

_AOT = """
from flashinfer.spec import Spec

NAMES = {"torch.bfloat16": "bf16", "torch.float16": "f16", "torch.float8_e4m3fn": "e4m3"}

def _name(kind, q, kv, dim, window):
    q, kv = NAMES[str(q)], NAMES[str(kv)]
    return (
        f"batch_{kind}_with_kv_cache_dtype_q_{q}_dtype_kv_{kv}_dtype_o_{q}_dtype_idx_i32"
        f"_head_dim_qk_{dim}_head_dim_vo_{dim}_posenc_0_use_swa_{window}_use_logits_cap_False"
    )

def gen_fa2(dtype_qo, dtype_kv, head_dim_qk, head_dim_vo, use_sliding_window,
            use_logits_soft_cap, prefill_only=False):
    shape = (dtype_qo, dtype_kv, head_dim_qk, use_sliding_window)
    yield Spec(_name("prefill", *shape) + "_f16qk_False_kv_stride_equal")
    if not prefill_only:
        yield Spec(_name("decode", *shape))

def gen_fa3(dtype_q, dtype_kv, dtype_o, head_dim_qk, head_dim_vo, use_sliding_window,
            use_logits_soft_cap):
    if dtype_q == dtype_kv:
        shape = (dtype_q, dtype_kv, head_dim_qk, use_sliding_window)
        yield Spec(_name("prefill", *shape) + "_f16qk_False_sm90")
"""

_CPP_EXT = """
import os
import shutil

def get_cuda_path():
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
    if home is not None:
        return home
    found = shutil.which("nvcc")
    if found is None:
        raise RuntimeError("Could not find nvcc")
    return os.path.dirname(os.path.dirname(found))
"""

_SIMPLE = (
    "from flashinfer.spec import Spec\n\ndef {function}({parameters}):\n    return Spec({name})\n"
)

_FILES = {
    "__init__.py": '__version__ = "0.7.2.post1"\n',
    "spec.py": _SPEC,
    "aot.py": _AOT,
    "jit/__init__.py": "",
    "jit/cpp_ext.py": _CPP_EXT,
    "jit/activation.py": _SIMPLE.format(
        function="gen_act_and_mul_module", parameters="act", name='f"{act}_and_mul"'
    ),
    **{
        f"jit/{name}.py": _SIMPLE.format(
            function=f"gen_{name}_module", parameters="", name=repr(name)
        )
        for name in ("norm", "rope", "page")
    },
}


def write_package(folder: Path) -> Path:
    """Write it below `folder`, which is what the path of imports must have. Returns the package."""
    for name, text in _FILES.items():
        path = folder / "flashinfer" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return folder / "flashinfer"


def install_package(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """`write_package`, and make this process import it in place of an installed one."""
    for name in [name for name in sys.modules if name.partition(".")[0] == "flashinfer"]:
        monkeypatch.delitem(sys.modules, name)
    package = write_package(folder)
    monkeypatch.syspath_prepend(str(folder))
    return package


def forget_package(monkeypatch: pytest.MonkeyPatch) -> None:
    """Undo `install_package`."""
    monkeypatch.undo()
    for name in [name for name in sys.modules if name.partition(".")[0] == "flashinfer"]:
        del sys.modules[name]
