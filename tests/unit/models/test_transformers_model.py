"""Decoders that transformers' code computes over our pages: its own tokens, whatever the steps."""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import cycle
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from engine.attention.flashinfer_backend import lack_of_attention
from engine.checkpoint import layout
from engine.checkpoint.layout import ModelLayout, beyond_plain, read_layout
from engine.checkpoint.model_config import ModelConfig
from engine.config import EngineConfig
from engine.errors import ConfigError
from engine.layers.embedding_table import RowTable
from engine.models import recording
from engine.models.parts import TiedEmbedding
from engine.models.recording import classify
from engine.models.transformers_model import TransformersModel
from tests.support.engines import engine_for, greedy_reference, load_reference
from tests.support.models import THROUGH_TRANSFORMERS, make_model
from tests.support.other_architectures import (
    GREEDY,
    MAX_NEW,
    PROMPTS,
    SHARED,
    assert_same_as_transformers,
    made_when_asked,
    with_layers,
)
from tests.support.step_driver import make_runner

DIFFERENT = "keys and values of different sizes"


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Path]]:
    """Models by name, made when first asked for; layouts are recorded in this process."""
    with made_when_asked(tmp_path_factory, with_layers(THROUGH_TRANSFORMERS)) as found:
        yield found


@pytest.mark.parametrize(("name", "page"), zip(THROUGH_TRANSFORMERS, cycle((1, 16)), strict=False))
def test_tokens_and_logprobs_are_those_of_transformers(
    folders: dict[str, Path], name: str, page: int
) -> None:
    assert_same_as_transformers(folders[name], page_size=page)


def test_rotations_that_depend_on_the_longest_text_are_those_of_max_model_len(
    folders: dict[str, Path], tmp_path: Path
) -> None:
    rope = {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "short_factor": [1.0, 1.0, 1.0, 1.0],
        "long_factor": [1.0, 2.0, 5.0, 9.0],
    }
    keys = {"original_max_position_embeddings": 48, "rope_parameters": rope}
    folder = make_model(tmp_path, "Phi3ForCausalLM", **keys)
    model = load_reference(folder)
    long, short = [PROMPTS[2]], [SHARED[:20], [5]]
    with engine_for(folder) as engine:  # steps of long and of short texts
        assert engine.run(long, GREEDY, chunked_prefill_size=16) == greedy_reference(
            model, long, MAX_NEW
        )
        assert engine.run(short, GREEDY) != greedy_reference(model, short, MAX_NEW)
    with engine_for(folder, max_model_len=48) as engine:
        assert engine.run(short, GREEDY) == greedy_reference(model, short, MAX_NEW)


def test_what_a_layout_holds(folders: dict[str, Path]) -> None:
    found = ModelConfig.from_pretrained(folders["gemma3"])
    assert found.layout is not None
    assert found.layout.class_name == "Gemma3ForCausalLM"
    assert found.layer_windows == (24, None, 24, None)
    assert {call.scale for call in found.layout.calls} == {0.25}
    assert (found.num_heads, found.num_kv_heads, found.head_dim) == (4, 2, 16)


def test_a_layout_is_recorded_once(
    folders: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MANTA_CACHE_DIR", str(tmp_path))
    asked: list[Path] = []

    def record(folder: Path) -> bytes:
        asked.append(folder)
        return layout.msgspec.json.encode(recording.record(folder))

    monkeypatch.setattr(layout, "_record", record)
    first = read_layout(folders["granite"])
    assert read_layout(folders["granite"]) == first and len(asked) == 1
    (kept,) = (tmp_path / "layouts").iterdir()
    kept.write_text("{")
    assert read_layout(folders["granite"]) == first and len(asked) == 2
    monkeypatch.setenv("MANTA_CACHE_DIR", "/proc/nowhere")
    assert read_layout(folders["granite"]) == first, "a cache that can't be written only costs time"


def test_another_process_records(folders: dict[str, Path], tmp_path: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MANTA_CACHE_DIR", str(tmp_path))
        found = read_layout(folders["granite"])
        assert isinstance(found, ModelLayout) and len(found.calls) == 4
        odd = tmp_path / "odd"
        odd.mkdir()
        keys = {"model_type": "own", "architectures": ["OwnModel"], "auto_map": {"AutoConfig": "a"}}
        (odd / "config.json").write_text(json.dumps(keys))
        with pytest.raises(ConfigError, match=r"OwnModel.*doesn't know.*'own'.*never does"):
            read_layout(odd)


def test_what_attention_lacks_is_refused_by_name(folders: dict[str, Path], tmp_path: Path) -> None:
    folder = make_model(tmp_path, "RwkvForCausalLM", attention_hidden_size=32)
    lack = "attention through transformers' interface"
    with pytest.raises(ConfigError, match=f"a RwkvForCausalLM, which needs {lack}"):
        ModelConfig.from_pretrained(folder)


@pytest.mark.parametrize(
    ("name", "beyond"),
    [
        ("gemma2", {"a soft cap of attention"}),
        ("gpt_oss", {"attention sinks"}),
        ("llama4", {"chunked attention"}),
        ("deepseek_v3", {DIFFERENT, "latents, of which values are a part of the keys"}),
        (
            "gemma4",
            {"keys of another layer", "heads of different sizes or numbers between layers"},
        ),
        ("gemma3", set()),
    ],
)
def test_what_flashinfer_lacks_is_named(
    folders: dict[str, Path], name: str, beyond: set[str]
) -> None:
    calls = ModelConfig.from_pretrained(folders[name]).calls
    assert set(beyond_plain(calls)) == beyond
    if beyond:
        assert all(word in lack_of_attention(torch.bfloat16, calls) for word in beyond)
    wide = [msgspec.structs.replace(call, k_dim=64, v_dim=64) for call in calls]
    assert (lack_of_attention(torch.bfloat16, wide) == "") == (not beyond - {DIFFERENT})


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"num_hidden_layers": 10**9}, "names 1000000000 layers; 1 to 2000 are allowed"),
        ({"num_hidden_layers": "many"}, "can't read|names many layers"),
        ({"hidden_size": 0}, "can't read|can't build|can't be followed"),
        ({"num_attention_heads": 7}, "can't read|can't build|query heads"),
        ({"hidden_act": "unheard of"}, "can't read|can't build|can't be followed"),
        ({"model_type": "bart"}, "half of a 'bart', which has an encoder"),
        ({"model_type": "vit"}, "generates no text"),
    ],
)
def test_odd_configurations_are_refused_in_a_sentence(
    folders: dict[str, Path], tmp_path: Path, keys: dict[str, Any], words: str
) -> None:
    config = json.loads((folders["granite"] / "config.json").read_text()) | keys
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match=words):
        ModelConfig.from_pretrained(tmp_path)


def test_states_beside_the_cache_are_noticed_when_it_is_loaded(
    folders: dict[str, Path], tmp_path: Path
) -> None:
    folder = make_model(tmp_path, "RecurrentGemmaForCausalLM", lru_width=32)
    with pytest.raises(ConfigError, match="keeps states of requests beside attention"):
        make_runner(folder)


def test_what_cannot_be_made_native_is_refused(folders: dict[str, Path]) -> None:
    folder = str(folders["granite"])
    with pytest.raises(ConfigError, match=r"architecture GraniteForCausalLM .* is not supported"):
        EngineConfig(model=folder, model_impl="native").resolve()


def test_a_llama_through_transformers_is_the_native_one(
    folders: dict[str, Path], tmp_path: Path
) -> None:
    folder = make_model(tmp_path, "LlamaForCausalLM")
    found = {}
    for impl in ("native", "transformers"):
        with engine_for(folder, model_impl=impl) as engine:
            found[impl] = engine.run(PROMPTS, GREEDY)
    assert found["native"] == found["transformers"]


def test_rules_of_masks() -> None:
    def causal(batch: Any, head: Any, query: Any, key: Any) -> Any:
        return key <= query

    def window(batch: Any, head: Any, query: Any, key: Any) -> Any:
        return (key <= query) & (key > query - 24)

    def chunk(batch: Any, head: Any, query: Any, key: Any) -> Any:
        return (key <= query) & (key // 48 == query // 48)

    def odd(batch: Any, head: Any, query: Any, key: Any) -> Any:
        return (key <= query) & (key % 3 == query % 3)

    assert classify(causal) == ("causal", None)
    assert classify(window) == ("sliding", 24)
    assert classify(chunk) == ("chunked", 48)
    assert classify(odd)[0] == "other"
    assert classify(lambda batch, head, query, key: key >= 0)[0] == "other"


@pytest.mark.parametrize(("name", "scaled"), [("phi3", False), ("gemma3", True)])
def test_a_tied_matrix_is_kept_once(
    folders: dict[str, Path], tmp_path: Path, name: str, scaled: bool
) -> None:
    arch, keys = with_layers(THROUGH_TRANSFORMERS)[name]
    folder = make_model(tmp_path, arch, **keys | {"tie_word_embeddings": True})
    kernels = EngineConfig().kernel_choice("cpu")
    model = make_runner(str(folder), kernels=kernels).model
    assert isinstance(model, TransformersModel)
    tied = [part for part in model.decoder.modules() if isinstance(part, TiedEmbedding)]
    assert len(tied) == 1 and (tied[0].scale is not None) == scaled
    size = tied[0].num_embeddings * tied[0].embedding_dim
    assert all(p.numel() < size for p in model.decoder.parameters())
    reference: Any = load_reference(folder).get_input_embeddings()
    ids = torch.tensor([[0, 5, 199], [7, 5, 1]])
    assert torch.equal(tied[0](ids), reference(ids))
    assert_same_as_transformers(folder, page_size=16)


def test_an_embedding_that_computes_more_is_not_looked_up_in_the_head() -> None:
    class Shifted(torch.nn.Embedding):
        def forward(self, input: torch.Tensor) -> torch.Tensor:
            return super().forward(input) + 1

    own = Shifted(16, 8)
    assert TiedEmbedding.of(own, RowTable(own.weight)) is None


def test_rows_of_zeros_do_not_hide_a_scale() -> None:
    class Scaled(torch.nn.Embedding):
        factor = torch.tensor(3.0)

        def forward(self, input: torch.Tensor) -> torch.Tensor:
            return super().forward(input) * self.factor

    own = Scaled(16, 8).requires_grad_(False)
    own.scale = own.factor
    own.weight[:9] = 0
    tied = TiedEmbedding.of(own, RowTable(own.weight))
    assert tied is not None and torch.equal(tied(torch.arange(16)), own(torch.arange(16)))
    own.weight[:] = 0
    assert TiedEmbedding.of(own, RowTable(own.weight)) is None
