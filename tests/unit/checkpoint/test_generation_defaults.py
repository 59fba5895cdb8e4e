"""Sampling defaults of a model folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from engine.checkpoint.generation_defaults import FILE, read_generation_defaults
from engine.errors import ConfigError
from engine.llm import LLM


def read(folder: Path, content: Any) -> dict[str, float]:
    text = content if isinstance(content, str) else json.dumps(content)
    (folder / FILE).write_text(text)
    return read_generation_defaults(folder, 100)


def test_only_sampling_fields_are_read(tmp_path: Path) -> None:
    assert read_generation_defaults(tmp_path, 100) == {}
    found = read(tmp_path, {"temperature": 0.6, "top_k": 20, "top_p": None, "eos_token_id": 3})
    assert found == {"temperature": 0.6, "top_k": 20}


@pytest.mark.parametrize(
    "content",
    ["{", "[]", {"temperature": "x"}, {"temperature": True}, {"top_p": 2}, {"top_k": 1.5}],
)
def test_what_cannot_be_served_names_the_file_and_the_remedy(tmp_path: Path, content: Any) -> None:
    with pytest.raises(ConfigError, match=r"generation_config\.json.*generation_config: none"):
        read(tmp_path, content)


def test_llm_takes_the_models_defaults(tmp_path: Path) -> None:
    source = Path("models/manta-small").resolve()
    for path in source.iterdir():
        if path.name != FILE:
            (tmp_path / path.name).symlink_to(path)
    content = json.loads((source / FILE).read_text()) | {"temperature": 0.0, "top_p": 0.5}
    (tmp_path / FILE).write_text(json.dumps(content))
    with LLM(str(tmp_path), max_total_tokens=512) as llm:
        params = llm.default_sampling_params()
        assert (params.temperature, params.top_p) == (0.0, 0.5)
        texts = {llm.generate("import", use_tqdm=False)[0].outputs[0].text for _ in range(2)}
        assert len(texts) == 1
    with LLM(str(tmp_path), max_total_tokens=512, generation_config="none") as llm:
        assert llm.default_sampling_params().temperature == 1.0
