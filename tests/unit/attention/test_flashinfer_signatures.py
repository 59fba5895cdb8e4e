"""The fake package's signatures are the installed one's. Skipped where it isn't installed."""

from __future__ import annotations

import importlib.util

import pytest

from engine.flashinfer_loader import check_wrapper, load_flashinfer
from tests.support.fake_flashinfer import Device, make_module, signatures

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
