"""Whether the CPU kernels can run on this machine."""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Iterable
from pathlib import Path

SWITCH = "MANTA_CPU_KERNELS"
"""The environment variable that switches the kernels off."""
CPU_INFO = Path("/proc/cpuinfo")
NEEDED_FLAGS = ("avx2", "fma", "f16c")
"""What a processor must have, in the words of /proc/cpuinfo."""
_AVX512 = ("avx512f", "avx512bw", "avx512vl", "avx512dq")
ISA_NEEDS = {
    "avx512": _AVX512,
    "avx512bf16": (*_AVX512, "avx512_bf16"),
    "amx": (*_AVX512, "avx512_bf16", "amx_tile", "amx_bf16"),
}
"""What the instruction sets of `engine.native.compiler.ISA_FLAGS` need, in the same words."""
BFLOAT16_FLAGS = ("avx512_bf16", "amx_tile")


def is_switched_off() -> bool:
    """Whether the user doesn't want the kernels."""
    return os.environ.get(SWITCH, "").strip().lower() in ("off", "0", "no", "false")


def unsuitable_platform() -> str:
    """Why no library can be made for this system; "" if one can."""
    machine = platform.machine().lower()
    if sys.platform != "linux" or machine not in ("x86_64", "amd64"):
        return f"they exist for Linux on x86-64 only, and this is {platform.system()} on {machine}"
    return ""


def unsuitable_processor() -> str:
    """Why the library can't run on this processor; "" if it can."""
    flags = processor_flags()
    missing = [f"no {flag.upper()}" for flag in NEEDED_FLAGS if flag not in flags]
    return f"this processor has {' and '.join(missing)}" if missing else ""


def instruction_sets(known: Iterable[str]) -> list[str]:
    """Those of `known` that this processor may have; all if it doesn't tell."""
    flags = processor_flags()
    return [isa for isa in known if not flags or flags.issuperset(ISA_NEEDS.get(isa, ()))]


def has_bfloat16() -> bool:
    """Whether the processor multiplies in bfloat16: AVX512-BF16 or AMX."""
    return not processor_flags().isdisjoint(BFLOAT16_FLAGS)


def processor_flags() -> frozenset[str]:
    """The flags of the first processor; empty if they can't be read."""
    try:
        with CPU_INFO.open() as lines:
            for line in lines:  # stops early: with many processors the file is slow to read
                name, _, value = line.partition(":")
                if name.strip() == "flags":
                    return frozenset(value.split())
    except OSError:
        pass
    return frozenset()
