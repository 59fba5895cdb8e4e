"""What a process takes of memory for a quantized model, as the system counts it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from gguf import GGMLQuantizationType as Kind

from benchmarks.common import REPO_ROOT
from engine.checkpoint.gguf.folder import model_folder, source_files
from tests.support.gguf_files import keep_folders_in, write_random_gguf
from tests.support.load_memory import Taken

MIB = 1 << 20
BUFFERS = 32 * MIB
"""Those of a step, more with more threads."""
SMALL: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 256,
    "intermediate_size": 768,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 512,
    "max_position_embeddings": 1024,
    "rms_norm_eps": 1e-5,
}
LARGE = SMALL | {
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_hidden_layers": 16,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "vocab_size": 8192,
}
NUMBERS = 258_998_272
"""In the matrices of `LARGE`."""


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The folders that Manta makes of a small file, for the libraries, and of a large one."""
    folder = tmp_path_factory.mktemp("files")
    with pytest.MonkeyPatch.context() as patch:
        keep_folders_in(folder, patch)
        made = []
        for name, config in (("small", SMALL), ("large", LARGE)):
            write_random_gguf(folder / f"{name}.gguf", config, Kind.Q4_0)
            made.append(model_folder(folder / f"{name}.gguf"))
    return made[0], made[1]


def taken_by(files: tuple[Path, Path], *settings: str) -> Taken:
    module = [sys.executable, "-m", "tests.support.load_memory"]
    done = subprocess.run(
        [*module, *map(str, files), *settings], cwd=REPO_ROOT, stdout=subprocess.PIPE, check=True
    )
    return Taken(**json.loads(done.stdout.splitlines()[-1]))


@pytest.mark.skipif(sys.platform != "linux", reason="Linux says what a process takes")
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_four_bits_stay_four_bits(dtype: str, files: tuple[Path, Path]) -> None:
    """Weights and KV cache take what was estimated, and 15 % more at most. No 16-bit copy is made
    on the way. Pages of the file, which is mapped, count only in the peak: the system may drop
    them at any time."""
    taken = taken_by(files, "kernels=cpu", f"dtype={dtype}")
    assert taken.weights == pytest.approx(NUMBERS * 4.5 / 8, rel=0.01)
    most = 1.15 * (taken.weights + taken.cache)
    assert taken.loaded <= most and taken.used <= most + BUFFERS, taken
    allowed = 1.5 * taken.weights + taken.cache + 64 * MIB
    assert allowed < 2 * NUMBERS, "a 16-bit copy wouldn't be seen"
    (file,) = source_files(files[1])
    assert taken.peak - file.stat().st_size < allowed, taken


def test_a_plain_copy_would_be_seen(files: tuple[Path, Path]) -> None:
    """torch multiplies by no packed matrix: they all become plain."""
    taken = taken_by(files, "kernels=torch", "dtype=bfloat16")
    assert taken.weights == pytest.approx(2 * NUMBERS, rel=0.01)
    assert taken.loaded > 1.9 * NUMBERS and taken.peak > 1.9 * NUMBERS
