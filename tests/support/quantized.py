"""Quantized checkpoints of tiny models, beside plain ones of the numbers that they stand for.

Those of compressed-tensors are made and read back by that library. The others are packed here, as
their formats lay them out.
"""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

Tensors = dict[str, Tensor]
Packed = tuple[Tensors, Tensor]
"""Tensors by what stands in place of "weight", and the float32 matrix that they stand for."""

LINEARS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
SIZES: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 192, "num_hidden_layers": 2}
"""Of models whose matrices have groups of 32 inputs on each of two ranks."""


@dataclass(frozen=True)
class Form:
    """One kind of quantized checkpoint."""

    config: dict[str, Any]
    """config.json's `quantization_config`."""
    pack: Callable[[Tensor], Packed]
    """Of a float32 matrix."""
    keeps_grouped: bool = False
    """Whether whole numbers and groups of neighbours are what the matrix consists of."""
    beside: dict[str, Any] = field(default_factory=dict)
    """Content of hf_quant_config.json, which then is the only description."""


def write(plain: Path, form: Form, folder: Path) -> tuple[Path, Path]:
    """The folders of the model in `plain`, quantized and with the numbers that this stands for,
    below `folder`."""
    quantized, reference = folder / "quantized", folder / "reference"
    shutil.copytree(plain, quantized)
    shutil.copytree(plain, reference)
    stored, meant = {}, {}
    for name, tensor in load_file(plain / "model.safetensors").items():
        base = name.removesuffix("weight")
        if name.endswith(".weight") and base.split(".")[-2] in LINEARS:
            tensors, meant[name] = form.pack(tensor.float())
            stored.update({base + suffix: x.contiguous() for suffix, x in tensors.items()})
        else:
            stored[name] = meant[name] = tensor
    save_file(stored, quantized / "model.safetensors", metadata={"format": "pt"})
    save_file(meant, reference / "model.safetensors", metadata={"format": "pt"})
    if form.beside:
        (quantized / "hf_quant_config.json").write_text(json.dumps(form.beside))
    else:
        config = json.loads((quantized / "config.json").read_text())
        config["quantization_config"] = form.config
        (quantized / "config.json").write_text(json.dumps(config))
    return quantized, reference


# --- float8 and int8 with scales


def float8_blocks(weight: Tensor, block: tuple[int, int] = (32, 48)) -> Packed:
    out, inputs = weight.shape
    scales = torch.empty(-(-out // block[0]), -(-inputs // block[1]))
    numbers, meant = torch.empty_like(weight, dtype=torch.float8_e4m3fn), torch.empty_like(weight)
    for i in range(len(scales)):
        for j in range(scales.shape[1]):
            here = (
                slice(i * block[0], (i + 1) * block[0]),
                slice(j * block[1], (j + 1) * block[1]),
            )
            scales[i, j] = weight[here].abs().max() / 448
            numbers[here] = (weight[here] / scales[i, j]).to(torch.float8_e4m3fn)
            meant[here] = numbers[here].float() * scales[i, j]
    return {"weight": numbers, "weight_scale_inv": scales}, meant


def float8_rows(weight: Tensor) -> Packed:
    scales = weight.abs().amax(1, keepdim=True) / 448
    numbers = (weight / scales).to(torch.float8_e4m3fn)
    return {"weight": numbers, "weight_scale": scales}, numbers.float() * scales


def float8_whole(weight: Tensor) -> Packed:
    scale = weight.abs().max() / 448
    numbers = (weight / scale).to(torch.float8_e4m3fn)
    tensors = {"weight": numbers, "weight_scale": scale, "input_scale": torch.tensor(0.5)}
    return tensors, numbers.float() * scale


def bitsandbytes_int8(weight: Tensor) -> Packed:
    peaks = weight.abs().amax(1)
    numbers = (weight * (127 / peaks[:, None])).round().to(torch.int8)
    form = torch.zeros((), dtype=torch.uint8)
    meant = numbers.float() * peaks[:, None] * (1 / 127)
    return {"weight": numbers, "SCB": peaks, "weight_format": form}, meant


# --- whole numbers in int32


def pack_words(numbers: Tensor, bits: int) -> Tensor:
    """int32 [n, ceil(m * bits / 32)] of whole numbers [n, m], from the low bits up."""
    per = 32 // bits
    padded = torch.nn.functional.pad(numbers.long(), (0, -numbers.shape[1] % per))
    shifts = bits * torch.arange(per)
    words = (padded.view(len(numbers), -1, per) << shifts).sum(-1)
    return (words - ((words >> 31) << 32)).to(torch.int32)


def whole_numbers(
    weight: Tensor, bits: int, group: int, order: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Numbers [out, in], float16 scales and zeros [out, groups], and the matrix they stand for.
    `order`: the group of each input."""
    out, inputs = weight.shape
    order = torch.arange(inputs) // group if order is None else order
    top, groups = (1 << bits) - 1, int(order.max()) + 1
    scales, zeros = torch.empty(out, groups), torch.empty(out, groups)
    for g in range(groups):
        here = weight[:, order == g]
        low, high = here.amin(1).clamp(max=0), here.amax(1).clamp(min=0)
        scales[:, g] = ((high - low) / top).half().float()
        zeros[:, g] = (-low / scales[:, g]).round().clamp(1, top)
    numbers = (weight / scales[:, order] + zeros[:, order]).round().clamp(0, top)
    meant = (numbers - zeros[:, order]) * scales[:, order]
    return numbers, scales.half(), zeros, meant


def gptq(bits: int, group: int, shift: int = 1, acts: bool = False) -> Callable[[Tensor], Packed]:
    """`shift`: 1 for version 1, where a zero is stored less 1. `acts`: groups are of inputs in an
    order of their own."""

    def pack(weight: Tensor) -> Packed:
        inputs = weight.shape[1]
        size = inputs if group == -1 else group
        order = torch.arange(inputs) // size
        if acts:
            order = order[torch.randperm(inputs, generator=torch.Generator().manual_seed(inputs))]
        numbers, scales, zeros, meant = whole_numbers(weight, bits, size, order)
        tensors = {
            "qweight": pack_words(numbers, bits).t(),
            "qzeros": pack_words(zeros.t() - shift, bits),
            "scales": scales.t(),
            "g_idx": order.to(torch.int32),
        }
        return tensors, meant

    return pack


def awq(weight: Tensor, group: int = 32) -> Packed:
    numbers, scales, zeros, meant = whole_numbers(weight, 4, group)

    def pack(x: Tensor) -> Tensor:
        mixed = x.view(len(x), -1, 8)[:, :, [0, 2, 4, 6, 1, 3, 5, 7]]
        return pack_words(mixed.flatten(1), 4)

    tensors = {"qweight": pack(numbers.t().contiguous()), "qzeros": pack(zeros.t().contiguous())}
    return {**tensors, "scales": scales.t()}, meant


# --- float4

FLOAT4 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])


def nearest(values: Tensor, table: Tensor) -> Tensor:
    """uint8: the entry of `table` nearest to each of `values`."""
    return (values.unsqueeze(-1) - table).abs().argmin(-1).to(torch.uint8)


def modelopt_float4(weight: Tensor) -> Packed:
    blocks = weight.view(len(weight), -1, 16)
    over = weight.abs().max() / (6 * 448)
    scales = (blocks.abs().amax(-1) / 6 / over).to(torch.float8_e4m3fn)
    steps = (scales.float() * over).unsqueeze(-1)
    numbers = nearest(blocks / steps, FLOAT4).flatten(1)
    meant = FLOAT4[numbers.long()].view_as(blocks) * steps
    tensors = {
        "weight": numbers[:, ::2] | numbers[:, 1::2] << 4,
        "weight_scale": scales,
        "weight_scale_2": over,
        "input_scale": torch.tensor(0.5),
    }
    return tensors, meant.flatten(1)


def experts_float4(stacked: Tensor) -> tuple[Tensor, Tensor]:
    """Blocks uint8 [E, out, in / 32, 16] and scales uint8 [E, out, in / 32] of a transposed matrix
    [E, in, out]."""
    blocks = stacked.transpose(1, 2).unflatten(-1, (-1, 32))
    exponents = torch.floor(torch.log2(blocks.abs().amax(-1))) - 2
    numbers = nearest(blocks / torch.exp2(exponents).unsqueeze(-1), FLOAT4)
    packed = numbers[..., ::2] | numbers[..., 1::2] << 4
    return packed, (exponents + 127).to(torch.uint8)


# --- tables of 16 numbers

# fmt: off
NF4 = torch.tensor([
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635,
    -0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725,
    0.24611230194568634, 0.33791524171829224, 0.44070982933044434, 0.5626170039176941,
    0.7229568362236023, 1.0,
])
FP4 = torch.tensor([
    0.0, 0.005208333333333333, 0.6666666666666666, 1.0,
    0.3333333333333333, 0.5, 0.16666666666666666, 0.25,
    -0.0, -0.005208333333333333, -0.6666666666666666, -1.0,
    -0.3333333333333333, -0.5, -0.16666666666666666, -0.25,
])
# fmt: on


def bitsandbytes_4(kind: str, is_nested: bool) -> Callable[[Tensor], Packed]:
    """`kind`: nf4 or fp4. `is_nested`: whether scales are quantized, too."""
    table = NF4 if kind == "nf4" else FP4

    def pack(weight: Tensor, block: int = 64, nested: int = 32) -> Packed:
        flat = weight.flatten()
        padded = torch.nn.functional.pad(flat, (0, -len(flat) % block)).view(-1, block)
        peaks = padded.abs().amax(-1)
        state: dict[str, Any] = {"quant_type": kind, "blocksize": block, "dtype": "bfloat16"}
        state["shape"] = list(weight.shape)
        tensors = {"weight.quant_map": table.clone(), "weight.absmax": peaks}
        if is_nested:
            codes, mean = torch.linspace(-1, 1, 256), peaks.mean()
            groups = torch.nn.functional.pad(peaks - mean, (0, -len(peaks) % nested))
            tops = groups.view(-1, nested).abs().amax(-1)
            places = torch.arange(len(peaks)) // nested
            numbers = nearest((peaks - mean) / tops[places], codes)
            peaks = codes[numbers.long()] * tops[places] + mean
            tensors["weight.absmax"] = numbers
            tensors["weight.nested_absmax"], tensors["weight.nested_quant_map"] = tops, codes
            state |= {"nested_blocksize": nested, "nested_offset": float(mean)}
            state["nested_dtype"] = "float32"
        numbers = nearest(padded / peaks[:, None], table)
        meant = (table[numbers.long()] * peaks[:, None]).flatten()[: len(flat)].view_as(weight)
        pairs = numbers.flatten()[: len(flat)].view(-1, 2)
        tensors["weight"] = (pairs[:, :1] << 4) | pairs[:, 1:]
        said = json.dumps(state).encode()
        tensors[f"weight.quant_state.bitsandbytes__{kind}"] = torch.tensor(list(said)).byte()
        return tensors, meant

    return pack


# --- compressed-tensors


def compressed(form: str, ordered: bool = False, acts: bool = False, **weights: Any) -> Form:
    """By the library itself. `ordered`: with the groups of inputs in an order of their own."""
    from compressed_tensors.compressors.base import BaseCompressor
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
    from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam

    weights = {"symmetric": True, "num_bits": 8, **weights}
    arguments = QuantizationArgs(**weights)
    scheme = QuantizationScheme(targets=["Linear"], weights=arguments)
    compressor = BaseCompressor.get_value_from_registry(form)

    def pack(weight: Tensor) -> Packed:
        out, inputs = weight.shape
        strategy = weights["strategy"]
        height, width = {
            "tensor": (out, inputs),
            "channel": (1, inputs),
            "group": (1, weights.get("group_size")),
            "tensor_group": (1, weights.get("group_size")),
            "block": weights.get("block_structure", (0, 0)),
        }[strategy]
        order = torch.arange(inputs) // (width or 1)
        shuffled = torch.randperm(inputs, generator=torch.Generator().manual_seed(1))
        if ordered:
            weight = weight[:, shuffled]
        blocks = weight.view(math.ceil(out / height), height, math.ceil(inputs / width), width)
        low, high = blocks.amin((1, 3)), blocks.amax((1, 3))
        state: Tensors = {"weight": weight}
        over = None
        if strategy == "tensor_group" and "nv" in form:
            over = generate_gparam(weight.min(), weight.max())
            state["weight_global_scale"] = over
        scales, zeros = calculate_qparams(low, high, arguments, global_scale=over)
        if strategy == "tensor":
            scales, zeros = scales.view(1), zeros.view(1)
        state |= {"weight_scale": scales, "weight_zero_point": zeros}
        tensors = compressor.compress(state, scheme)
        meant = compressor.decompress(dict(tensors), scheme)["weight"].float()
        if over is not None:  # the library computes in bfloat16
            steps = (tensors["weight_scale"].float() / over.float()).repeat_interleave(16, 1)
            exact = FLOAT4[unpack_bytes(tensors["weight_packed"]).long()] * steps
            torch.testing.assert_close(meant, exact, rtol=2**-7, atol=0)
            meant = exact
        if ordered:
            # Input i stood at place back[i]: its numbers are there, its group is that of the place.
            back = shuffled.argsort()
            tensors["weight_g_idx"] = order[back].to(torch.int32)
            natural = unpack_rows(tensors["weight_packed"], weights["num_bits"])[:, back]
            tensors["weight_packed"] = pack_words(natural, weights["num_bits"])
            meant = meant[:, back]
        return tensors, meant

    group: dict[str, Any] = {
        "targets": ["Linear"],
        "weights": arguments.model_dump(mode="json"),
    }
    if acts:
        group["input_activations"] = {"num_bits": 8, "dynamic": True, "strategy": "token"}
    config = {
        "quant_method": "compressed-tensors",
        "format": form,
        "quantization_status": "compressed",
        "ignore": ["lm_head", "re:.*embed.*"],
        "config_groups": {"group_0": group},
    }
    grouped = weights.get("type") != "float" and strategy_is_grouped(weights) and not ordered
    return Form(config, pack, grouped or "fp4" in form)


def strategy_is_grouped(weights: dict[str, Any]) -> bool:
    """Whether `Grouped` can hold such whole numbers: those of 8 bits need scales of outputs."""
    return bool(weights["symmetric"] or weights["strategy"] == "group")


def unpack_rows(packed: Tensor, bits: int) -> Tensor:
    """The opposite of `pack_words`, for whole words."""
    shifts = bits * torch.arange(32 // bits, dtype=torch.int32)
    return ((packed.unsqueeze(-1) >> shifts) & ((1 << bits) - 1)).flatten(1)


def unpack_bytes(packed: Tensor) -> Tensor:
    """[n, 2 * m] of 4 bits each, of bytes [n, m]."""
    return torch.stack([packed & 15, packed >> 4], -1).flatten(1)


_FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3"}
_GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False, "sym": False}
_NF4 = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}


def make_forms() -> dict[str, Form]:
    """Every kind that can be read of dense models."""
    return {
        "fp8-blocks": Form({**_FP8, "weight_block_size": [32, 48]}, float8_blocks),
        "fp8-matrix": Form({"quant_method": "fp8", "activation_scheme": "static"}, float8_whole),
        "fbgemm": Form({"quant_method": "fbgemm_fp8"}, float8_rows),
        "gptq": Form(_GPTQ, gptq(4, 32), True),
        "gptq-8-v2": Form(
            {**_GPTQ, "bits": 8, "group_size": -1, "checkpoint_format": "gptq_v2"},
            gptq(8, -1, 0),
            True,
        ),
        "gptq-2": Form({**_GPTQ, "bits": 2}, gptq(2, 32), True),
        "gptq-order": Form({**_GPTQ, "desc_act": True}, gptq(4, 32, 1, True)),
        "awq": Form(
            {"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemm"}, awq, True
        ),
        "nf4": Form(_NF4, bitsandbytes_4("nf4", False)),
        "nf4-nested": Form(_NF4, bitsandbytes_4("nf4", True)),
        "fp4": Form({**_NF4, "bnb_4bit_quant_type": "fp4"}, bitsandbytes_4("fp4", False)),
        "int8-bitsandbytes": Form(
            {"quant_method": "bitsandbytes", "load_in_8bit": True}, bitsandbytes_int8, True
        ),
        "modelopt-fp8": Form(
            {},
            float8_whole,
            beside={"quantization": {"quant_algo": "FP8", "kv_cache_quant_algo": "FP8"}},
        ),
        "modelopt-nvfp4": Form(
            {"quant_method": "modelopt", "quant_algo": "NVFP4"}, modelopt_float4, True
        ),
        "ct-fp8-channel": compressed(
            "float-quantized", acts=True, strategy="channel", type="float"
        ),
        "ct-fp8-tensor": compressed("float-quantized", strategy="tensor", type="float"),
        "ct-fp8-block": compressed(
            "float-quantized", strategy="block", type="float", block_structure=[16, 32]
        ),
        "ct-int8": compressed("int-quantized", acts=True, strategy="channel"),
        "ct-int8-zeros": compressed("int-quantized", strategy="channel", symmetric=False),
        "ct-w4": compressed("pack-quantized", strategy="group", num_bits=4, group_size=32),
        "ct-w4-zeros": compressed(
            "pack-quantized", strategy="group", num_bits=4, group_size=32, symmetric=False
        ),
        "ct-w8-channel": compressed("pack-quantized", strategy="channel"),
        "ct-w4-order": compressed(
            "pack-quantized", True, strategy="group", num_bits=4, group_size=32
        ),
        "ct-nvfp4": compressed(
            "nvfp4-pack-quantized",
            strategy="tensor_group",
            num_bits=4,
            type="float",
            group_size=16,
            scale_dtype=torch.float8_e4m3fn,
        ),
        "ct-mxfp4": compressed(
            "mxfp4-pack-quantized",
            strategy="group",
            num_bits=4,
            type="float",
            group_size=32,
            scale_dtype=torch.uint8,
        ),
    }


def write_experts_float4(plain: Path, folder: Path) -> tuple[Path, Path]:
    """The same as `write` for the mixtures of a gpt-oss in `plain`, as it is published; what the
    numbers stand for is said by transformers."""
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    quantized, reference = folder / "quantized", folder / "reference"
    shutil.copytree(plain, quantized)
    shutil.copytree(plain, reference)
    stored, meant = {}, {}
    for name, tensor in load_file(plain / "model.safetensors").items():
        if name.endswith(("gate_up_proj", "down_proj")):
            blocks, scales = experts_float4(tensor)
            stored |= {f"{name}_blocks": blocks.contiguous(), f"{name}_scales": scales.contiguous()}
            found = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)
            meant[name] = found.contiguous()
        else:
            stored[name] = meant[name] = tensor
    save_file(stored, quantized / "model.safetensors", metadata={"format": "pt"})
    save_file(meant, reference / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((quantized / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "mxfp4"}
    (quantized / "config.json").write_text(json.dumps(config))
    return quantized, reference
