"""The table of tried types, the page that shows it, and the line that a server prints."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from deploy.start import cli
from engine.checkpoint import tried_types
from engine.checkpoint.model_config import ModelConfig
from engine.checkpoint.tried_types import (
    TriedType,
    TriedTypes,
    model_line,
    read_tried_types,
    write_tried_types,
)
from scripts.models_page import FAMILIES, PAGE, STATES, render
from tests.support.models import make_model

ROOT = Path(__file__).resolve().parents[3]
SMALL = ROOT / "models/manta-small"


def test_the_page_is_what_the_script_makes_of_the_table() -> None:
    assert PAGE.read_text() == render(read_tried_types()), "run scripts/models_page.py"


def test_the_numbers_of_the_page_are_those_of_its_table() -> None:
    page = PAGE.read_text()
    rows = [
        line.split(" | ")
        for line in page.partition("## All types")[2].splitlines()
        if line.startswith("| `")
    ]
    assert len(rows) > 150
    said = re.search(r"knows (\d+) types", page)
    assert said is not None and int(said[1]) == len(rows)
    for words, state in (
        ("runs on Manta's own code", "native"),
        ("runs on the code of transformers", "transformers"),
        ("refused", "refused"),
        ("other tokens than transformers", "wrong"),
    ):
        number = re.search(rf"^\| {words} \| (\d+) \|$", page, re.MULTILINE)
        assert number is not None
        assert int(number[1]) == sum(row[2] == STATES[state] for row in rows), state


def test_the_table_is_whole() -> None:
    table = read_tried_types()
    kinds = [tried.type for tried in table.types]
    assert kinds == sorted(set(kinds))
    assert {kind for names in FAMILIES.values() for kind in names.split()} <= set(kinds)
    for tried in table.types:
        assert bool(tried.sentence) != tried.runs, tried
        assert "/tmp" not in tried.sentence
    natives = {tried.type for tried in table.types if tried.state == "native"}
    assert natives == {"llama", "mistral", "qwen2", "qwen3"}


def test_it_is_written_as_it_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tried_types, "FILE", tmp_path / "table.json")
    two = (
        TriedType(type="b", class_name="B", state="refused", sentence='it says "no" | ü', tp2=""),
        TriedType(
            type="a",
            class_name="A",
            state="native",
            reference="forward",
            pp2="it can't",
            embeddings="",
        ),
    )
    write_tried_types(TriedTypes("5.0", two))
    assert read_tried_types() == TriedTypes("5.0", two[::-1])
    page = render(read_tried_types())
    assert '| `b` | B | no, refused | yes |  |  |  |  |  | it says "no" \\| ü |' in page
    assert "| `a` | A | yes, Manta's own code |  | no |  | yes |  |  |  |" in page
    assert "| `pp_size` | it can't | 1: `a` |" in page
    assert "\n- two tensor parallel ranks: 1 types\n" in page
    assert "For `a` the tokens are those of the model's forward" in page


@pytest.mark.parametrize(
    ("state", "words"),
    [
        ("native", "type llama is tested against transformers 9.9"),
        ("refused", "type llama was refused when it was tested: because"),
        ("wrong", "type llama gave other tokens when it was tested: because"),
        (None, "type llama is untested"),
    ],
)
def test_the_line_of_a_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, state: str | None, words: str
) -> None:
    rows = [] if state is None else [
        {"type": "llama", "class_name": "L", "state": state, "sentence": "because"}
    ]  # fmt: skip
    table = tried_types.msgspec.convert({"transformers": "9.9", "types": rows}, TriedTypes)
    monkeypatch.setattr(tried_types, "read_tried_types", lambda: table)
    model = ModelConfig.from_pretrained(SMALL)
    assert model_line(model) == f"computed by Manta's own code; {words}"


def test_what_a_model_cannot_be_divided_by(tmp_path: Path) -> None:
    folder = make_model(
        tmp_path,
        "LlamaForCausalLM",
        num_attention_heads=3,
        num_key_value_heads=3,
        hidden_size=24,
        num_hidden_layers=1,
    )
    line = model_line(ModelConfig.from_pretrained(folder))
    assert line.endswith("; can't be divided by tp_size: 2 or pp_size: 2")


def test_manta_check_prints_the_line(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:1")  # the machine itself isn't looked at
    monkeypatch.setattr("deploy.start.launch.check_cluster_token", lambda address: None)
    assert cli.main(["check", str(SMALL)]) == 0
    model = ModelConfig.from_pretrained(SMALL)
    assert f"model: {model_line(model)}\n" in capsys.readouterr().out
