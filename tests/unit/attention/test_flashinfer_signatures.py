"""The fakes' signatures and module names are the installed package's. Skipped without it."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from engine.device.flashinfer_loader import check_wrapper, load_flashinfer, pin_ranges
from tests.support.fake_flashinfer import Device, make_module, signatures
from tests.support.flashinfer_package import write_package
from tests.support.source_files import ROOT

if importlib.util.find_spec("flashinfer") is None:
    pytest.skip("flashinfer isn't installed", allow_module_level=True)


def test_signatures() -> None:
    real, fake = signatures(load_flashinfer()), signatures(make_module(Device(())))
    assert fake == real


def test_wrappers_have_the_buffers_that_are_replaced() -> None:
    import inspect

    package = load_flashinfer()
    for name in ("BatchDecodeWithPagedKVCacheWrapper", "BatchPrefillWithPagedKVCacheWrapper"):
        source = inspect.getsource(getattr(package, name).__init__)
        wrapper = type("Wrapper", (), {})()
        for attribute in ("_int_workspace_buffer", "_pin_memory_int_workspace_buffer"):
            if f"self.{attribute} =" in source:
                setattr(wrapper, attribute, None)
        check_wrapper(wrapper)


def test_constant_of_decode_plans_can_be_pinned(monkeypatch: pytest.MonkeyPatch) -> None:
    utils = load_flashinfer("flashinfer.utils")
    monkeypatch.setattr(utils, "_cache_buf", {})
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda numbers: numbers)
    pin_ranges(100)
    ours = {numbers.data_ptr() for numbers in utils._cache_buf.values()}
    assert len(ours) == 1
    for size in (1, 2, 3, 33, 64, 100):
        numbers = utils._get_range_buf(size, "cpu")
        assert numbers.tolist() == list(range(size)) and numbers.data_ptr() in ours


_NAMES = """
import itertools, sys, torch
from engine.device import flashinfer_modules as modules

half, fp8 = (torch.bfloat16, torch.float16), torch.float8_e4m3fn
found = [*modules.operator_modules()]
for dtype, head_dim, window in itertools.product(half, (64, 128, 256), (False, True)):
    for kv_dtype in (dtype, fp8):
        sizes = (dtype, kv_dtype, head_dim, window)
        found += [*modules.prefill_modules(*sizes, fa3=False), *modules.decode_modules(*sizes)]
        found += modules.prefill_modules(*sizes, fa3=True)
print("\\n".join(spec.name for spec in found))
"""


def test_modules_have_the_names_of_the_package_on_disk(tmp_path: Path) -> None:
    write_package(tmp_path)

    def names(*folders: Path) -> list[str]:
        path = os.pathsep.join(map(str, [ROOT, *folders, *sys.path]))
        env = {**os.environ, "PYTHONPATH": path, "FLASHINFER_CUDA_ARCH_LIST": "9.0a"}
        command = [sys.executable, "-c", _NAMES]
        return subprocess.check_output(command, env=env, text=True).splitlines()

    assert names() == names(tmp_path)
