"""GGUF headers are read as the `gguf` package reads them; damaged ones are refused."""

from __future__ import annotations

import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from gguf import GGMLQuantizationType as Kind

from engine.checkpoint.gguf.checkpoint import part_files, read_checkpoint
from engine.checkpoint.gguf.header import read_header
from engine.checkpoint.gguf.tensor_types import OTHER_TYPES, TENSOR_TYPES
from engine.errors import ConfigError
from tests.support.gguf_files import write_gguf
from tests.support.gguf_fuzz import peak_bytes, refusals
from tests.support.models import make_model
from tests.support.tiny_tokenizers import write_byte_level

SIZES = {"num_hidden_layers": 1, "vocab_size": 430, "hidden_size": 16, "intermediate_size": 16}
SPLIT = {"tokenizer.ggml.pre": "llama-bpe"}


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("header")
    model = make_model(folder / "model", "LlamaForCausalLM", **SIZES)
    tokenizer = write_byte_level(folder / "tokenizer")
    write_gguf(folder / "model.gguf", model, Kind.F16, tokenizer=tokenizer, metadata=SPLIT)
    return folder / "model.gguf"


def header(*parts: bytes, version: int = 3, tensors: int = 0, keys: int = 0) -> bytes:
    return struct.pack("<4sIQQ", b"GGUF", version, tensors, keys) + b"".join(parts)


def text(value: str) -> bytes:
    return struct.pack("<Q", len(value.encode())) + value.encode()


def key(name: str, kind: int, value: bytes) -> bytes:
    return text(name) + struct.pack("<I", kind) + value


def tensor(name: str, shape: list[int], kind: int = 0, offset: int = 0) -> bytes:
    dims = struct.pack(f"<I{len(shape)}Q", len(shape), *shape)
    return text(name) + dims + struct.pack("<IQ", kind, offset)


def test_everything_is_as_the_gguf_package_reads_it(file: Path) -> None:
    found, oracle = read_header(file), gguf.GGUFReader(file)
    for name, field in oracle.fields.items():
        if not name.startswith("GGUF."):
            wanted, value = field.contents(), found.metadata[name]
            if isinstance(wanted, float):
                assert np.float32(value) == np.float32(wanted)
            else:
                assert (value.tolist() if isinstance(value, np.ndarray) else value) == wanted
    assert list(found.tensors) == [tensor.name for tensor in oracle.tensors]
    for wanted in oracle.tensors:
        tensor = found.tensors[wanted.name]
        assert tensor.shape == tuple(wanted.shape[::-1].tolist())
        assert tensor.kind.name == wanted.tensor_type.name
        assert (tensor.offset, tensor.num_bytes) == (wanted.data_offset, wanted.n_bytes)


def test_types_are_those_of_the_gguf_package() -> None:
    for number, kind in TENSOR_TYPES.items():
        assert Kind(number).name == kind.name
        assert gguf.GGML_QUANT_SIZES[Kind(number)] == (kind.block_numbers, kind.block_bytes)
    named = {**OTHER_TYPES, **{number: kind.name for number, kind in TENSOR_TYPES.items()}}
    assert {kind.value: kind.name for kind in Kind}.items() <= named.items()


TWICE = key("a", 4, b"\1\0\0\0") * 2
LISTS = struct.pack("<IQ", 9, 1) * 6 + struct.pack("<IQ", 4, 0)


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"GGUF", "is too short for a GGUF file"),
        (b"\0" * 40, "isn't a GGUF file"),
        (header(version=1), "version 1; Manta reads versions 2 and 3"),
        (header(version=3 << 24), "for big-endian machines"),
        (header(keys=2**40), "it claims 1099511627776 keys"),
        (header(tensors=2**63), "and 9223372036854775808 tensors"),
        (header(keys=1), "ends within its header"),
        (header(struct.pack("<Q", 2**60), keys=1), "it has a text of 1152921504606846976 bytes"),
        (header(struct.pack("<Q", 2) + b"\xff\xff", keys=1), "isn't UTF-8"),
        (header(TWICE, keys=2), "it has the key 'a' twice"),
        (header(key("a", 77, b""), keys=1), "a value of the unknown type 77"),
        (header(key("a", 9, struct.pack("<IQ", 8, 2**50)), keys=1), "a list of 1125899906842624"),
        (header(key("a", 9, struct.pack("<IQ", 4, 2**62)), keys=1), "ends within its header"),
        (header(key("a", 9, LISTS), keys=1), "lists in lists in lists"),
        (header(key("general.alignment", 4, b"\7\0\0\0"), keys=1), "general.alignment is 7"),
        (header(key("general.alignment", 8, text("x")), keys=1), "general.alignment is 'x'"),
        (header(tensor("a", [4], 99), tensors=1), "number 99, which Manta can't read"),
        (header(tensor("a", [256], 11), tensors=1), "type Q3_K, which Manta can't read. It reads"),
        (header(tensor("a", []), tensors=1), "has 0 dimensions"),
        (header(tensor("a", [1] * 5), tensors=1), "has 5 dimensions"),
        (header(tensor("a", [0]), tensors=1), r"the shape \[0\], which F32 can't have"),
        (header(tensor("a", [33], 8), tensors=1), r"the shape \[33\], which Q8_0 can't have"),
        (header(tensor("a", [2**63, 2**63]), tensors=1), "is cut short: it has"),
        (header(tensor("a", [8], 0, 4), b"\0" * 99, tensors=1), "isn't aligned"),
        (header(tensor("a", [8], 0, 2**63), b"\0" * 99, tensors=1), "is cut short: it has"),
        (header(tensor("a", [8]), tensor("a", [8]), tensors=2), "the tensor 'a' twice"),
        (header(tensor("a", [8]), tensor("b", [8]), b"\0" * 99, tensors=2), "'a' and 'b' overlap"),
    ],
)
def test_what_cannot_be(content: bytes, says: str, tmp_path: Path) -> None:
    spoiled = tmp_path / "model.gguf"
    spoiled.write_bytes(content)
    with pytest.raises(ConfigError, match=says) as told:
        read_header(spoiled)
    assert str(spoiled) in str(told.value)


def test_a_folder_and_nothing(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "nothing.gguf"):
        with pytest.raises(ConfigError, match="can't be read"):
            read_header(path)


def test_long_lists_take_bounded_memory(tmp_path: Path) -> None:
    """Four million empty texts: the count is refused before they are made."""
    empty = struct.pack("<IQ", 8, 1 << 22) + b"\0" * (8 << 22)
    (tmp_path / "model.gguf").write_bytes(header(key("a", 9, empty), keys=1))
    assert peak_bytes(tmp_path / "model.gguf") < 1 << 20


def test_damaged_files_are_refused_in_a_sentence(file: Path) -> None:
    """tests/extended has more of them."""
    assert refusals(file, range(3000)) > 2000


def split_model(folder: Path) -> list[Path]:
    model = make_model(folder / "model", "LlamaForCausalLM", num_hidden_layers=1)
    write_gguf(folder / "model.gguf", model, Kind.F16, num_files=3)
    return sorted(folder.glob("model-*.gguf"))


def test_split_files_are_one_model(tmp_path: Path) -> None:
    parts = split_model(tmp_path)
    assert len(parts) == 3
    for part in parts:
        assert part_files(part) == tuple(parts)
    whole = read_checkpoint(tuple(parts))
    assert len(whole.tensors) == 12
    assert {tensor.file for tensor in whole.tensors.values()} == set(parts)


def remove(parts: list[Path]) -> None:
    parts[1].unlink()


def repeat(parts: list[Path]) -> None:
    parts[2].write_bytes(parts[1].read_bytes())


def rename(parts: list[Path]) -> None:
    parts[0].rename(parts[0].with_name("model.gguf"))
    parts[0] = parts[0].with_name("model.gguf")


@pytest.mark.parametrize(
    ("spoil", "says"),
    [
        (remove, "model-00002-of-00003.gguf is missing"),
        (repeat, "which another file has, too"),
        (rename, "says that it is one of 3 files"),
    ],
)
def test_parts_that_do_not_fit(
    spoil: Callable[[list[Path]], Any], says: str, tmp_path: Path
) -> None:
    parts = split_model(tmp_path)
    spoil(parts)
    with pytest.raises(ConfigError, match=says):
        read_checkpoint(part_files(parts[0]))
