"""The types that tensors of GGUF files have. Numbers and sizes as in ggml's `ggml.h`."""

from __future__ import annotations

from typing import NamedTuple


class TensorType(NamedTuple):
    """Neighbouring numbers of a row form blocks, which are stored whole."""

    name: str
    block_numbers: int
    block_bytes: int

    @property
    def is_plain(self) -> bool:
        """Whether each number stands by itself."""
        return self.block_numbers == 1


TENSOR_TYPES = {
    0: TensorType("F32", 1, 4),
    1: TensorType("F16", 1, 2),
    2: TensorType("Q4_0", 32, 18),
    3: TensorType("Q4_1", 32, 20),
    6: TensorType("Q5_0", 32, 22),
    7: TensorType("Q5_1", 32, 24),
    8: TensorType("Q8_0", 32, 34),
    12: TensorType("Q4_K", 256, 144),
    13: TensorType("Q5_K", 256, 176),
    14: TensorType("Q6_K", 256, 210),
    30: TensorType("BF16", 1, 2),
}
"""What Manta reads, by the number in the file."""

OTHER_TYPES = {
    4: "Q4_2",
    5: "Q4_3",
    9: "Q8_1",
    10: "Q2_K",
    11: "Q3_K",
    15: "Q8_K",
    16: "IQ2_XXS",
    17: "IQ2_XS",
    18: "IQ3_XXS",
    19: "IQ1_S",
    20: "IQ4_NL",
    21: "IQ3_S",
    22: "IQ2_S",
    23: "IQ4_XS",
    24: "I8",
    25: "I16",
    26: "I32",
    27: "I64",
    28: "F64",
    29: "IQ1_M",
    34: "TQ1_0",
    35: "TQ2_0",
    39: "MXFP4",
    40: "NVFP4",
    41: "Q1_0",
}
"""What it refuses by name."""


def refused_type(number: int) -> str:
    """What to tell of a tensor of a type that Manta can't read."""
    name = OTHER_TYPES.get(number, f"number {number}")
    return (
        f"has the type {name}, which Manta can't read. It reads "
        f"{', '.join(kind.name for kind in TENSOR_TYPES.values())}: use such a file of the model, "
        "e.g. one named Q4_K_M, Q5_K_M, Q6_K or Q8_0."
    )
