"""FlashInfer's documented behaviour in plain torch on CPU, at least as strict as the real package.

Signatures are copies of flashinfer-python 0.7.2.post1's (`test_flashinfer_signatures.py` compares
them where the package is installed). A plan goes the real way: it is written to the wrapper's
pinned buffer, and a copy to the device's buffer is queued. `run` is queued behind that copy and
uses the content of the device's buffer. By default the queue runs at once; `Device.deferred` keeps
it, like a device that is busy with earlier steps.
"""

from __future__ import annotations

import importlib.machinery
import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.support import torch_kernels


@dataclass
class Device:
    """The work queued on the pretended device, and counts of the calls that planned it."""

    dtypes: tuple[torch.dtype, ...]
    queue: list[Callable[[], None]] = field(default_factory=list)
    holding: bool = False
    plans: int = 0
    fast_plans: int = 0
    calls: list[str] = field(default_factory=list)

    def submit(self, work: Callable[[], None]) -> None:
        """Run `work` now, or at the end of `deferred`."""
        if self.holding:
            self.queue.append(work)
        else:
            work()

    @contextmanager
    def deferred(self) -> Iterator[None]:
        """Start no work on the device before the block ends."""
        self.holding = True
        yield
        self.holding = False
        queue, self.queue = self.queue, []
        for work in queue:
            work()


def _ints(tensor: Tensor, count: int | None = None) -> None:
    assert tensor.dtype == torch.int32
    assert tensor.dim() == 1
    assert tensor.is_contiguous()
    assert count is None or len(tensor) == count


def _write_plan(wrapper: Any, indptr: Tensor, last_page_len: Tensor, page_size: int) -> None:
    """Do the work of the C++ planner; the plan here is the rows' lengths."""
    lens = (indptr.diff() - 1) * page_size + last_page_len
    pinned = wrapper._pin_memory_int_workspace_buffer
    assert pinned.dtype == torch.uint8
    assert pinned.numel() >= wrapper._int_workspace_buffer.numel()
    count = lens.numel()
    pinned.view(torch.int32)[:count] = lens
    target = wrapper._int_workspace_buffer

    def copy() -> None:
        target.view(torch.int32)[:count] = pinned.view(torch.int32)[:count]

    wrapper._device.submit(copy)


def _attend(
    wrapper: Any, q: Tensor, kv: tuple[Tensor, Tensor], qo_indptr: list[int], out: Tensor
) -> None:
    """Attention of the rows, from the buffers' content when the device runs it."""
    plan = wrapper._plan
    indptr = wrapper._paged_kv_indptr_buf.tolist()
    last = wrapper._paged_kv_last_page_len_buf.tolist()
    indices = wrapper._paged_kv_indices_buf
    planned = wrapper._int_workspace_buffer.view(torch.int32)
    page_size, group = plan["page_size"], q.shape[1] // kv[0].shape[2]
    for row in range(len(last)):
        pages = indices[indptr[row] : indptr[row + 1]].long()
        length = (len(pages) - 1) * page_size + last[row]
        assert length == int(planned[row]), "the device's plan isn't this step's"
        begin, end = qo_indptr[row : row + 2]
        # Bytes, because torch can't index float8 tensors.
        keys, values = (
            x.view(torch.uint8)[pages].view(x.dtype).flatten(0, 1)[:length].double() for x in kv
        )
        keys, values = (x.repeat_interleave(group, 1) for x in (keys, values))
        scores = torch.einsum("qhd,shd->hqs", q[begin:end].double(), keys) * plan["sm_scale"]
        query = torch.arange(length - (end - begin), length).unsqueeze(1)
        key = torch.arange(length)
        hidden = key > query
        if plan["window_left"] >= 0:
            hidden |= key < query - plan["window_left"]
        weights = scores.masked_fill(hidden, -torch.inf).softmax(-1)
        out[begin:end] = torch.einsum("hqs,shd->qhd", weights, values).to(out.dtype)


def _check_run(wrapper: Any, q: Tensor, kv: tuple[Tensor, Tensor], out: Tensor) -> None:
    plan = wrapper._plan
    assert isinstance(kv, tuple)
    for cache in kv:
        assert cache.dtype == plan["kv_data_type"]
        assert cache.is_contiguous()
        assert cache.shape[1:] == (plan["page_size"], plan["num_kv_heads"], plan["head_dim"])
    assert q.dtype == plan["q_data_type"]
    assert q.shape[1:] == (plan["num_qo_heads"], plan["head_dim"])
    assert q.stride(-1) == 1
    assert out.shape == q.shape
    assert out.dtype == plan["o_data_type"]
    assert out.is_contiguous()


class _Wrapper:
    _device: Device

    def _init(self, float_workspace_buffer: Tensor, kv_layout: str, backend: str) -> None:
        assert float_workspace_buffer.dtype == torch.uint8
        assert not float_workspace_buffer.any()
        assert kv_layout == "NHD"
        assert backend in ("fa2", "fa3")
        self._backend = backend
        # Small, so that tests can have many wrappers.
        self._int_workspace_buffer = torch.zeros(4096, dtype=torch.uint8)
        self._pin_memory_int_workspace_buffer = torch.zeros(4096, dtype=torch.uint8)

    def _check_pages(self, indptr: Tensor, indices: Tensor, last: Tensor, page_size: int) -> None:
        _ints(indptr)
        _ints(last, len(indptr) - 1)
        _ints(indices)
        assert int(indptr[0]) == 0
        assert int(indptr[-1]) == len(indices)
        assert bool((indptr.diff() > 0).all())
        assert bool(((last >= 1) & (last <= page_size)).all())

    def _check_types(self, q: object, kv: object, o: object) -> None:
        assert q in self._device.dtypes
        assert o == q
        assert kv in (q, torch.float8_e4m3fn)


class BatchDecodeWithPagedKVCacheWrapper(_Wrapper):
    def __init__(
        self,
        float_workspace_buffer,
        kv_layout="NHD",
        use_cuda_graph=False,
        use_tensor_cores=False,
        paged_kv_indptr_buffer=None,
        paged_kv_indices_buffer=None,
        paged_kv_last_page_len_buffer=None,
        backend="auto",
        jit_args=None,
    ) -> None:
        self._init(float_workspace_buffer, kv_layout, backend)
        self._use_cuda_graph = use_cuda_graph
        self.use_tensor_cores = use_tensor_cores
        if use_cuda_graph:
            _ints(paged_kv_last_page_len_buffer)
            _ints(paged_kv_indptr_buffer, len(paged_kv_last_page_len_buffer) + 1)
            _ints(paged_kv_indices_buffer)
        self._paged_kv_indptr_buf = paged_kv_indptr_buffer
        self._paged_kv_indices_buf = paged_kv_indices_buffer
        self._paged_kv_last_page_len_buf = paged_kv_last_page_len_buffer

    def plan(
        self,
        indptr,
        indices,
        last_page_len,
        num_qo_heads,
        num_kv_heads,
        head_dim,
        page_size,
        *deprecated_positional_args,
        **kwargs,
    ) -> None:
        assert not deprecated_positional_args
        self._plan_impl(
            indptr,
            indices,
            last_page_len,
            num_qo_heads,
            num_kv_heads,
            head_dim,
            page_size,
            **kwargs,
        )

    def _plan_impl(
        self,
        indptr,
        indices,
        last_page_len,
        num_qo_heads,
        num_kv_heads,
        head_dim,
        page_size,
        *,
        pos_encoding_mode="NONE",
        window_left=-1,
        window_right=0,
        logits_soft_cap=None,
        q_data_type="float16",
        kv_data_type=None,
        o_data_type=None,
        data_type=None,
        sm_scale=None,
        rope_scale=None,
        rope_theta=None,
        non_blocking=True,
        block_tables=None,
        seq_lens=None,
        fixed_split_size=None,
        disable_split_kv=False,
        q_len_per_req=1,
        is_causal=None,
    ) -> None:
        self._device.plans += 1
        self._check_pages(indptr, indices, last_page_len, page_size)
        self._check_types(q_data_type, kv_data_type, o_data_type)
        if seq_lens is not None:
            _ints(seq_lens)
            assert torch.equal(seq_lens, (indptr.diff() - 1) * page_size + last_page_len)
        if not self.use_tensor_cores:
            assert num_qo_heads // num_kv_heads in (1, 2, 3, 4, 6, 8, 16)
            assert kv_data_type == q_data_type
        if self._use_cuda_graph:
            assert len(last_page_len) == len(self._paged_kv_last_page_len_buf)
            assert len(indices) <= len(self._paged_kv_indices_buf)
            self._paged_kv_indptr_buf.copy_(indptr)
            self._paged_kv_last_page_len_buf.copy_(last_page_len)
            self._paged_kv_indices_buf[: len(indices)].copy_(indices)
        else:
            self._paged_kv_indptr_buf = indptr.clone()
            self._paged_kv_indices_buf = indices
            self._paged_kv_last_page_len_buf = last_page_len.clone()
        self._plan = {
            "num_qo_heads": num_qo_heads,
            "num_kv_heads": num_kv_heads,
            "head_dim": head_dim,
            "page_size": page_size,
            "window_left": window_left,
            "sm_scale": sm_scale,
            "q_data_type": q_data_type,
            "kv_data_type": kv_data_type,
            "o_data_type": o_data_type,
        }
        _write_plan(self, indptr, last_page_len, page_size)

    def run(
        self,
        q,
        paged_kv_cache,
        *args,
        q_scale=None,
        k_scale=None,
        v_scale=None,
        out=None,
        lse=None,
        return_lse=False,
        enable_pdl=None,
        window_left=None,
        sinks=None,
        q_len_per_req=None,
        skip_softmax_threshold_scale_factor=None,
        kv_cache_sf=None,
    ):
        assert not args
        _check_run(self, q, paged_kv_cache, out)
        rows = len(self._paged_kv_last_page_len_buf)
        assert q.shape[0] == rows
        frozen = _at_launch(self)
        self._device.submit(lambda: _attend(frozen, q, paged_kv_cache, list(range(rows + 1)), out))
        return out


def _at_launch(wrapper: Any) -> SimpleNamespace:
    """What a launch keeps: addresses of buffers, not their contents."""
    names = ("_paged_kv_indptr_buf", "_paged_kv_indices_buf", "_paged_kv_last_page_len_buf")
    names += ("_int_workspace_buffer", "_plan")
    return SimpleNamespace(**{name: getattr(wrapper, name) for name in names})


class BatchPrefillWithPagedKVCacheWrapper(_Wrapper):
    def __init__(
        self,
        float_workspace_buffer,
        kv_layout="NHD",
        use_cuda_graph=False,
        qo_indptr_buf=None,
        paged_kv_indptr_buf=None,
        paged_kv_indices_buf=None,
        paged_kv_last_page_len_buf=None,
        custom_mask_buf=None,
        mask_indptr_buf=None,
        backend="auto",
        jit_args=None,
        jit_kwargs=None,
        variant_owns_mask=False,
    ) -> None:
        assert not use_cuda_graph
        self._init(float_workspace_buffer, kv_layout, backend)

    def plan(
        self,
        qo_indptr,
        paged_kv_indptr,
        paged_kv_indices,
        paged_kv_last_page_len,
        num_qo_heads,
        num_kv_heads,
        head_dim_qk,
        page_size,
        head_dim_vo=None,
        custom_mask=None,
        packed_custom_mask=None,
        causal=False,
        pos_encoding_mode="NONE",
        use_fp16_qk_reduction=False,
        sm_scale=None,
        window_left=-1,
        logits_soft_cap=None,
        rope_scale=None,
        rope_theta=None,
        q_data_type="float16",
        kv_data_type=None,
        o_data_type=None,
        non_blocking=True,
        prefix_len_ptr=None,
        token_pos_in_items_ptr=None,
        token_pos_in_items_len=0,
        max_item_len_ptr=None,
        seq_lens=None,
        seq_lens_q=None,
        block_tables=None,
        max_token_per_sequence=None,
        max_sequence_kv=None,
        fixed_split_size=None,
        disable_split_kv=False,
        uniform_q_len=None,
    ) -> None:
        self._device.plans += 1
        assert causal
        assert uniform_q_len is None
        _ints(qo_indptr, len(paged_kv_indptr))
        self._check_pages(paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len, page_size)
        self._check_types(q_data_type, kv_data_type, o_data_type)
        if self._backend == "fa3":
            assert kv_data_type == q_data_type
        lens = (paged_kv_indptr.diff() - 1) * page_size + paged_kv_last_page_len
        assert torch.equal(seq_lens, lens)
        assert bool((qo_indptr.diff() <= lens).all())
        self._qo_indptr = qo_indptr.tolist()
        self._paged_kv_indptr_buf = paged_kv_indptr.clone()
        self._paged_kv_indices_buf = paged_kv_indices
        self._paged_kv_last_page_len_buf = paged_kv_last_page_len.clone()
        self._plan = {
            "num_qo_heads": num_qo_heads,
            "num_kv_heads": num_kv_heads,
            "head_dim": head_dim_qk,
            "page_size": page_size,
            "window_left": window_left,
            "sm_scale": sm_scale,
            "q_data_type": q_data_type,
            "kv_data_type": kv_data_type,
            "o_data_type": o_data_type,
        }
        _write_plan(self, paged_kv_indptr, paged_kv_last_page_len, page_size)

    def run(
        self,
        q,
        paged_kv_cache,
        *args,
        q_scale=None,
        k_scale=None,
        v_scale=None,
        out=None,
        lse=None,
        return_lse=False,
        lse_base="log2",
        lse_layout="NH",
        enable_pdl=None,
        window_left=None,
        sinks=None,
        kv_cache_sf=None,
        skip_softmax_threshold_scale_factor=None,
        use_fp16_softmax=None,
        uses_spcompress=None,
    ):
        assert not args
        _check_run(self, q, paged_kv_cache, out)
        assert q.shape[0] == self._qo_indptr[-1]
        frozen, qo_indptr = _at_launch(self), self._qo_indptr
        self._device.submit(lambda: _attend(frozen, q, paged_kv_cache, qo_indptr, out))
        return out


def fast_decode_plan(
    self,
    indptr,
    indices,
    last_page_len,
    num_qo_heads,
    num_kv_heads,
    head_dim,
    page_size,
    pos_encoding_mode="NONE",
    window_left=-1,
    logits_soft_cap=None,
    q_data_type=None,
    kv_data_type=None,
    data_type=None,
    sm_scale=None,
    rope_scale=None,
    rope_theta=None,
    non_blocking=True,
    fixed_split_size=None,
    disable_split_kv=False,
    q_len_per_req=1,
    global_override_indptr_cpu=None,
) -> None:
    assert hasattr(self, "_plan"), "needs a full plan first"
    assert self._use_cuda_graph
    self._device.fast_plans += 1
    self._check_types(q_data_type, kv_data_type, q_data_type)
    assert global_override_indptr_cpu is not None, "would copy from the device"
    assert len(last_page_len) == len(self._paged_kv_last_page_len_buf)
    assert len(indices) <= len(self._paged_kv_indices_buf)
    self._plan |= {"window_left": window_left, "sm_scale": sm_scale}
    _write_plan(self, global_override_indptr_cpu, last_page_len, page_size)


def rmsnorm(input, weight, eps=1e-6, out=None, enable_pdl=None):
    assert input.dim() in (2, 3)
    assert input.shape[0] > 0, "an empty grid can't be launched"
    assert input.stride(-1) == weight.stride(-1) == out.stride(-1) == 1
    assert weight.shape == input.shape[-1:]
    assert out.shape == input.shape
    assert input.dtype == weight.dtype == out.dtype
    wide = input.float()
    scale = (wide.square().mean(-1, keepdim=True) + eps).rsqrt()
    return out.copy_(wide * scale * weight.float())


def fused_add_rmsnorm(input, residual, weight, eps=1e-6, enable_pdl=None) -> None:
    assert input.dim() == residual.dim() == 2
    assert input.shape == residual.shape
    assert input.shape[0] > 0
    assert input.dtype == residual.dtype == weight.dtype
    assert input.data_ptr() != residual.data_ptr()
    residual.add_(input)
    rmsnorm(residual, weight, eps, out=input)


def silu_and_mul(input, out=None, enable_pdl=None):
    assert input.shape[0] > 0
    assert input.is_contiguous()
    assert out is None
    gate, up = input.float().chunk(2, dim=-1)
    return (torch.nn.functional.silu(gate) * up).to(input.dtype)


def apply_rope_with_cos_sin_cache_inplace(
    positions, query, key, head_size, cos_sin_cache, is_neox=True
) -> None:
    assert is_neox
    assert positions.dtype in (torch.int32, torch.int64)
    assert positions.is_contiguous()
    assert cos_sin_cache.dtype == torch.float32
    assert cos_sin_cache.is_contiguous()
    cos, sin = cos_sin_cache[positions.long()].unsqueeze(1).chunk(2, dim=-1)
    for x in (query, key):
        assert x.stride(-1) == 1
        view = x.view(x.shape[0], -1, head_size)
        first, second = view.float().chunk(2, dim=-1)
        view.copy_(torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1))


SIGNATURES = {
    "BatchDecodeWithPagedKVCacheWrapper": ("__init__", "plan", "_plan_impl", "run"),
    "BatchPrefillWithPagedKVCacheWrapper": ("__init__", "plan", "run"),
    "fast_decode_plan": (),
    "rmsnorm": (),
    "fused_add_rmsnorm": (),
    "silu_and_mul": (),
    "apply_rope_with_cos_sin_cache_inplace": (),
}
"""The part of the package that the fake has: functions, and classes with their methods."""


def signatures(module: Any) -> dict[str, list[tuple[str, str, object]]]:
    """Name -> parameters (name, kind, default) of what `SIGNATURES` lists."""
    found = {}
    for path, methods in SIGNATURES.items():
        target = module
        for part in path.split("."):
            target = getattr(target, part)
        callables = {f"{path}.{m}": getattr(target, m) for m in methods} or {path: target}
        for name, function in callables.items():
            found[name] = [
                (p.name, p.kind.name, p.default)
                for p in inspect.signature(function).parameters.values()
            ]
    return found


def make_module(device: Device) -> ModuleType:
    """A module `flashinfer` whose work is done on `device`."""
    module = ModuleType("flashinfer")
    module.__spec__ = importlib.machinery.ModuleSpec("flashinfer", None)
    contents: dict[str, Any] = {
        "BatchDecodeWithPagedKVCacheWrapper": type(
            "BatchDecodeWithPagedKVCacheWrapper",
            (BatchDecodeWithPagedKVCacheWrapper,),
            {"_device": device},
        ),
        "BatchPrefillWithPagedKVCacheWrapper": type(
            "BatchPrefillWithPagedKVCacheWrapper",
            (BatchPrefillWithPagedKVCacheWrapper,),
            {"_device": device},
        ),
        "fast_decode_plan": fast_decode_plan,
        "rmsnorm": rmsnorm,
        "fused_add_rmsnorm": fused_add_rmsnorm,
        "silu_and_mul": silu_and_mul,
        "apply_rope_with_cos_sin_cache_inplace": apply_rope_with_cos_sin_cache_inplace,
    }
    for name, value in contents.items():
        setattr(module, name, value)
    return module


def install(monkeypatch: pytest.MonkeyPatch) -> Device:
    """Make `import flashinfer` find the fake, which also takes float32 and any head size. torch
    stands in for the kernels in Triton around it."""
    import engine.device.flashinfer_loader as loader

    torch_kernels.install(monkeypatch)

    dtypes = (torch.float16, torch.bfloat16, torch.float32)
    device = Device(dtypes)
    monkeypatch.setitem(sys.modules, "flashinfer", make_module(device))
    monkeypatch.setattr(loader, "HALF_DTYPES", dtypes)
    monkeypatch.setattr(loader, "HEAD_DIMS", (4, 8, 16, 32, 64, 128))
    return device
