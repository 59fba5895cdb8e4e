"""How an embedding is made of a vector, and how a model's folder says that it is to be pooled."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from engine.checkpoint.pooling_defaults import FILE, read_pooling
from engine.config import EngineConfig
from engine.errors import ConfigError, RequestError
from engine.protocol.pooling import check_dimensions, check_pooling, read_embedding

MODEL = Path(__file__).resolve().parents[3] / "models" / "manta-small"


def data(*numbers: float) -> bytes:
    return np.array(numbers, "<f4").tobytes()


def test_an_embedding_is_cut_before_it_is_normalized() -> None:
    vector = data(3, 4, 12)
    assert read_embedding(vector, None, normalize=False).tolist() == [3, 4, 12]
    assert read_embedding(vector, 2, normalize=False).tolist() == [3, 4]
    assert read_embedding(vector, 2, normalize=True).tolist() == pytest.approx([0.6, 0.8])
    assert np.linalg.norm(read_embedding(vector, None, normalize=True)) == pytest.approx(1)


def test_an_embedding_is_float32_of_its_own() -> None:
    found = read_embedding(data(1, 2), None, normalize=False)
    assert found.dtype == np.float32
    found[0] = 5


@pytest.mark.parametrize("scale", [0.0, 1e-30, 1e30, 3e38])
def test_lengths_beyond_float32(scale: float) -> None:
    found = read_embedding(data(scale, scale), None, normalize=True)
    assert found.tolist() == pytest.approx([0.5**0.5] * 2 if scale else [0, 0])


@pytest.mark.parametrize("dimensions", [0, -1, 33, 2**70])
def test_dimensions_out_of_range(dimensions: int) -> None:
    with pytest.raises(RequestError, match="between 1 and 32") as caught:
        check_dimensions(dimensions, 32)
    assert caught.value.param == "dimensions"


def test_dimensions_within_range() -> None:
    for dimensions in (None, 1, 32):
        check_dimensions(dimensions, 32)


def test_pooling_is_a_known_word() -> None:
    check_pooling("last")
    check_pooling("mean")
    with pytest.raises(RequestError, match="last or mean, not 'cls'"):
        check_pooling("cls")


def write(folder: Path, content: Any) -> None:
    path = folder / FILE
    path.parent.mkdir(exist_ok=True)
    path.write_text(content if isinstance(content, str) else json.dumps(content))


@pytest.mark.parametrize(
    ("content", "pooling"),
    [
        (None, "last"),
        ({"pooling_mode_lasttoken": True, "pooling_mode_mean_tokens": False}, "last"),
        ({"word_embedding_dimension": 8, "pooling_mode_mean_tokens": True}, "mean"),
        ({"pooling_mode": "mean"}, "mean"),
        ({"pooling_mode": "lasttoken", "include_prompt": True}, "last"),
    ],
)
def test_what_the_folder_says(tmp_path: Path, content: Any, pooling: str) -> None:
    if content is not None:
        write(tmp_path, content)
    assert read_pooling(tmp_path) == pooling


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ({"pooling_mode_cls_token": True}, "cls_token"),
        (
            {"pooling_mode_mean_tokens": True, "pooling_mode_max_tokens": True},
            "mean_tokens and max",
        ),
        ({"pooling_mode": "weightedmean"}, "weightedmean"),
        ({}, "none"),
        ("[]", "can't be read"),
        ("{", "can't be read"),
    ],
)
def test_what_manta_has_not_names_file_and_remedy(tmp_path: Path, content: Any, words: str) -> None:
    write(tmp_path, content)
    with pytest.raises(ConfigError, match=words) as caught:
        read_pooling(tmp_path)
    assert "1_Pooling/config.json" in str(caught.value)
    assert "Set pooling: last or mean." in str(caught.value)


def test_the_key_goes_before_the_folder(tmp_path: Path) -> None:
    for path in MODEL.iterdir():
        (tmp_path / path.name).symlink_to(path)
    write(tmp_path, {"pooling_mode": "mean"})
    for key, pooling in (("auto", "mean"), ("last", "last"), ("mean", "mean")):
        config = EngineConfig(model=str(tmp_path), pooling=key)
        assert config.resolve().pooling == pooling
