"""The name of a library: which sources, flags, torch, Python and compiler it belongs to.

Finding it out takes milliseconds and doesn't import torch.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import platform
import re
import sysconfig
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

from engine.native.compiler import BINDING_FLAGS, ISA_FLAGS, KERNEL_FLAGS, LINK_FLAGS, Compiler
from engine.native.errors import BuildError

MODULE = "manta_cpu_kernels"
SOURCE_SUFFIXES = (".cpp", ".h")


class Torch(NamedTuple):
    """The installed torch. `description` is the text of its `version.py`, which names the commit
    and the CUDA version too."""

    folder: Path
    version: str
    description: str


def installed_torch() -> Torch:
    """The torch that `import torch` would import. Raises `BuildError` if there is none."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        raise BuildError("torch isn't installed", "install it with `make install`")
    folder = Path(spec.origin).parent
    try:
        description = (folder / "version.py").read_text()
    except OSError as error:
        raise BuildError(f"torch's version can't be read ({error})", "reinstall torch") from error
    match = re.search(r"^__version__\s*=\s*['\"](.+?)['\"]", description, re.M)
    return Torch(folder, match[1] if match else "unknown", description)


def source_files(source_dir: Path) -> list[Path]:
    """The sources, sorted. Raises `BuildError` if there are none."""
    files = sorted(file for file in source_dir.glob("*") if file.suffix in SOURCE_SUFFIXES)
    if not any(file.name == "bindings.cpp" for file in files):
        raise BuildError("their sources are not there", "reinstall Manta")
    return files


def library_stem(source_dir: Path, torch: Torch) -> str:
    """The start of the library's file name: torch's version, Python's ABI and a hash over
    everything but the compiler. Raises `BuildError`."""
    abi = str(sysconfig.get_config_var("SOABI"))
    flags = (KERNEL_FLAGS, BINDING_FLAGS, LINK_FLAGS, sorted(ISA_FLAGS.items()))
    parts: list[str | bytes] = [repr(flags), torch.version, torch.description]
    parts += [abi, platform.machine()]
    for file in source_files(source_dir):
        parts += [file.name, file.read_bytes()]
    return f"{MODULE}-{torch.version}-{abi}-{_digest(parts)[:16]}"


def tool_key(compiler: Compiler, instruction_sets: Sequence[str]) -> str:
    """A hash over the compiler, the library's instruction sets, and the C library, which has to be
    at least as new where the library is loaded: home folders may be shared by machines."""
    libc = os.confstr("CS_GNU_LIBC_VERSION") or ""
    return _digest([compiler.version, libc, *instruction_sets])[:8]


def _digest(parts: Iterable[str | bytes]) -> str:
    total = hashlib.sha256()
    for part in parts:
        data = part.encode() if isinstance(part, str) else part
        total.update(len(data).to_bytes(8, "little") + data)
    return total.hexdigest()
