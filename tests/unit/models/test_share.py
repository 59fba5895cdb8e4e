"""What ranks have of a model of transformers, and what can't be divided."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
import transformers
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.models.mixtral.modeling_mixtral import MixtralExperts

from engine.checkpoint.layout import Cut, Part, rank_calls
from engine.checkpoint.model_config import ModelConfig
from engine.config import EngineConfig
from engine.device.distributed import ParallelState
from engine.errors import ConfigError
from engine.layers.weights import SafetensorsSource
from engine.memory_need import cache_bytes_per_token, stage_bytes
from engine.models import recording
from engine.models.lazy_weights import LazyWeights
from engine.models.mixture_cuts import mixture_cut
from engine.models.share import Share
from tests.support.models import DIVISIBLE_HEADS, THROUGH_TRANSFORMERS, make_model
from tests.support.other_architectures import made_when_asked, with_layers
from tests.support.step_driver import make_runner

CPU = torch.device("cpu")
DIVISIBLE = [name for name in THROUGH_TRANSFORMERS if name != "gemma4"]
WHOLE = {"olmo2": 2, "deepseek_v3": 2}
"""Linears of a layer that every rank has whole: norms of queries and keys are over all heads, or
what is compressed goes to all of them."""
NUM_CUT_EXPERTS = {"mixtral": 8, "qwen3_moe": 8, "gpt_oss": 16, "deepseek_v3": 6}
"""Parameters of mixtures. Llama 4's have a module of its own kind."""
EXPERT_SPLITS = [(2, 1), (2, 2), (4, 1), (4, 2), (4, 4)]
"""tp_size and ep_size."""


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Path]]:
    """Models by name, made when first asked for; layouts are recorded in this process."""
    models = {
        name: (arch, keys | DIVISIBLE_HEADS.get(name, {}))
        for name, (arch, keys) in with_layers(THROUGH_TRANSFORMERS).items()
    }
    with made_when_asked(tmp_path_factory, models) as found:
        yield found


def share_of(config: ModelConfig, parallel: ParallelState) -> Any:
    """The model of one rank, before its linears are replaced."""
    folder = config.path
    assert config.layout is not None
    with torch.device("meta"):
        model: Any = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder))
    weights = LazyWeights(model, SafetensorsSource(folder, torch.float32, CPU), torch.float32)
    layers = config.stage_layers(parallel.pp_size)[parallel.pp_rank]
    share = Share(config.layout, layers, parallel)
    with torch.no_grad():
        share.prune(model)
        share.fill(model, weights, CPU)
    return model


@pytest.mark.parametrize("name", DIVISIBLE)
def test_ranks_have_what_memory_is_calculated_for(folders: dict[str, Path], name: str) -> None:
    config = ModelConfig.from_pretrained(folders[name])
    assert config.layout is not None
    whole = sum(p.numel() for p in share_of(config, ParallelState.single()).parameters())
    for tp_size, pp_size in ((1, 1), (4, 1), (1, 3), (2, 2)):
        layers = 0
        for pp_rank in range(pp_size):
            for tp_rank in range(tp_size):
                parallel = ParallelState(tp_rank, tp_size, pp_rank, pp_size)
                model = share_of(config, parallel)
                found = sum(p.numel() for p in model.parameters())
                biases = _row_biases(config, pp_size, pp_rank) if tp_rank else 0
                calculated = stage_bytes(config, 4, tp_size, pp_size, pp_rank)
                assert found + biases == calculated / 4, (tp_size, pp_size, pp_rank, tp_rank)
                assert tp_size * pp_size == 1 or found < whole
            layers += len(config.stage_layers(pp_size)[pp_rank])
        assert layers == 4


@pytest.mark.parametrize("name", NUM_CUT_EXPERTS)
def test_groups_of_ranks_have_what_memory_is_calculated_for(
    folders: dict[str, Path], name: str
) -> None:
    config = ModelConfig.from_pretrained(folders[name])
    model = share_of(config, ParallelState.single())
    for tp_size, ep_size in EXPERT_SPLITS:
        of_groups: list[Any] = []
        for tp_rank in range(tp_size):
            part = share_of(config, ParallelState(tp_rank, tp_size, 0, 1, ep_size=ep_size))
            found = sum(p.numel() for p in part.parameters())
            calculated = stage_bytes(config, 4, tp_size, 1, 0, ep_size=ep_size) / 4
            biases = _row_biases(config, 1, 0) if tp_rank else 0
            assert found + biases == calculated, (tp_size, ep_size, tp_rank)
            of_groups.append(part.model.layers[-1].mlp.experts)
        _check_together(of_groups, ep_size, model.model.layers[-1].mlp.experts)


def _check_together(parts: list[Any], ep_size: int, whole: Any) -> None:
    """The ranks of each group have all numbers of its experts, each once."""
    ranks, count = len(parts) // ep_size, whole.num_experts // ep_size
    for name, value in whole.named_parameters():
        for group in range(ep_size):
            mine = parts[group * ranks : (group + 1) * ranks]
            held = torch.cat([getattr(part, name).flatten() for part in mine])
            if name == "down_proj_bias":
                assert len(held) == ranks * count * 32
                held = held[held != 0]
            numbers = held.sort().values
            wanted = value[group * count : (group + 1) * count].flatten().sort().values
            assert torch.equal(numbers, wanted), (name, group)


def _row_biases(config: ModelConfig, pp_size: int, pp_rank: int) -> int:
    """Numbers of biases that only the first tensor parallel rank adds, experts' aside."""
    per_layer = {"gpt_neox": 2 * 32, "gpt_oss": 32}.get(config.path.name.rstrip("0123456789"), 0)
    return per_layer * len(config.stage_layers(pp_size)[pp_rank])


@pytest.mark.parametrize("name", DIVISIBLE)
def test_heads_experts_and_inner_sizes_are_divided(folders: dict[str, Path], name: str) -> None:
    config = ModelConfig.from_pretrained(folders[name])
    layout = config.layout
    assert layout is not None and layout.not_staged == ""
    assert all(call.is_divided for call in layout.calls)
    for tp_size in (2, 4):
        for call in rank_calls(layout.calls, tp_size, range(4)):
            assert call.num_heads == 4 // tp_size
            assert call.num_kv_heads == max(1, config.num_kv_heads // tp_size)
    divided = {cut.name.removesuffix(".weight") for cut in layout.cuts}
    model = AutoModelForCausalLM.from_pretrained(folders[name])
    inner = [n for n, m in model.named_modules() if type(m) is nn.Linear and ".layers." in n]
    assert len(set(inner) - divided) == 4 * WHOLE.get(name, 0)
    num_experts = sum(len(mixture.cuts) + len(mixture.whole) for mixture in layout.mixtures)
    assert num_experts == NUM_CUT_EXPERTS.get(name, 0)
    assert all(mixture.inner for mixture in layout.mixtures)


def test_layers_that_read_more_than_the_one_before_have_no_stages(
    folders: dict[str, Path],
) -> None:
    layout = ModelConfig.from_pretrained(folders["gemma4"]).layout
    assert layout is not None
    with pytest.raises(ConfigError, match="its layers read more than what the layer before"):
        layout.check_split(1, [range(2), range(2, 4)])


def test_a_stage_has_the_calls_of_its_layers(folders: dict[str, Path]) -> None:
    config = ModelConfig.from_pretrained(folders["gemma3"])
    layout = config.layout
    assert layout is not None
    (first, second) = (rank_calls(layout.calls, 2, layers) for layers in config.stage_layers(2))
    assert [call.window for call in first] == [call.window for call in second] == [24, None]
    assert {(call.num_heads, call.num_kv_heads) for call in first + second} == {(2, 1)}
    assert [call.layer for call in second] == [2, 3]
    # 4 layers, 2 key/value heads of 16, keys and values, 4 bytes
    assert cache_bytes_per_token(config, 4) == 4 * 2 * 16 * 2 * 4
    assert cache_bytes_per_token(config, 4, 2, 3) == 2 * 1 * 16 * 2 * 4
    shared = msgspec.structs.replace(layout.calls[3], kv_of=2)
    sharing = msgspec.structs.replace(layout, calls=(*layout.calls[:3], shared))
    assert rank_calls(sharing.calls, 1, range(2, 4))[1].kv_of == 0
    with pytest.raises(ConfigError, match=r"layer 3 .* reads the keys of an earlier one"):
        sharing.check_split(1, [range(3), range(3, 4)])


@pytest.mark.parametrize(
    ("name", "tp_size", "pp_size", "words"),
    [
        ("granite", 3, 1, r"tp_size \(3\) must divide the model's 4 attention heads"),
        ("gpt_neox", 8, 1, r"tp_size \(8\) must divide the model's 4 attention heads"),
        ("granite", 1, 5, r"pp_size \(5\) exceeds the model's 4 layers"),
    ],
)
def test_what_does_not_divide_is_refused(
    folders: dict[str, Path], name: str, tp_size: int, pp_size: int, words: str
) -> None:
    config = EngineConfig(model=str(folders[name]), tp_size=tp_size, pp_size=pp_size)
    with pytest.raises(ConfigError, match=words):
        config.resolve()


def test_sizes_that_do_not_divide_are_refused_by_the_weights_name(tmp_path: Path) -> None:
    arch, keys = THROUGH_TRANSFORMERS["mixtral"]
    folder = make_model(tmp_path, arch, **keys | {"num_local_experts": 3, "intermediate_size": 45})
    layout = recording.record(folder)
    words = r"tp_size \(2\) can't .*the 3 experts of 'model.*aren't .*, and the 45 inner numbers"
    with pytest.raises(ConfigError, match=words):
        layout.check_split(2, [range(3)])
    nothing = msgspec.structs.replace(layout, cuts=(), mixtures=())
    with pytest.raises(ConfigError, match="nothing of MixtralForCausalLM can be divided"):
        nothing.check_split(2, [range(3)])
    odd = msgspec.structs.replace(layout, not_staged="its layers aren't one list")
    with pytest.raises(ConfigError, match=r"stages, because its layers aren't one list; set pp_"):
        odd.check_split(1, [range(2), range(2, 3)])


@pytest.mark.parametrize(
    ("tp_size", "ep_size", "words"),
    [
        (4, 3, r"ep_size \(3\) must divide tp_size \(4\)"),
        (12, 12, r"tp_size \(12\): the 8 experts of .* aren't divided by 12"),
        (4, 2, r"the 45 inner numbers of an expert of .* aren't divided by 2"),
    ],
)
def test_groups_that_do_not_divide_are_refused(
    tmp_path: Path, tp_size: int, ep_size: int, words: str
) -> None:
    arch, keys = THROUGH_TRANSFORMERS["mixtral"]
    sizes = {"num_local_experts": 8, "intermediate_size": 45}
    layout = recording.record(make_model(tmp_path, arch, **keys | sizes))
    with pytest.raises(ConfigError, match=words):
        layout.expert_groups(tp_size, ep_size)
    assert [layout.expert_groups(tp_size, None) for tp_size in (1, 2, 3, 6, 8, 12)] == (
        [1, 2, 1, 2, 8, 4]
    )
    for mixed in ("norm", "softmax"):
        cut = mixture_cut("m", _mixing(mixed))
        assert cut is not None and cut.inner == 0
        other = msgspec.structs.replace(layout, mixtures=(cut,))
        with pytest.raises(ConfigError, match="an expert of 'm' can't be divided over 2 ranks"):
            other.expert_groups(4, 2)
        assert other.expert_groups(4, None) == 4


def _mixing(kind: str) -> Any:
    """A mixture whose experts read all of their inner numbers at once, or are normed."""
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_local_experts": 4}
    with torch.device("meta"):
        module: Any = MixtralExperts(transformers.MixtralConfig(**sizes))
    if kind == "softmax":
        module.act_fn = nn.Softmax(-1)
    else:
        module.has_post_expert_norm = True
    return module


@pytest.mark.parametrize("name", ["granite", "llama4"])
def test_ep_size_needs_experts(folders: dict[str, Path], name: str) -> None:
    config = EngineConfig(model=str(folders[name]), tp_size=2, ep_size=2)
    with pytest.raises(ConfigError, match="has none that can be divided; leave it out"):
        config.resolve()


def test_shares_of_parts() -> None:
    heads, shared = Part(32, 4), Part(16, 2, is_shared=True)
    assert [list(heads.share(2, rank))[::8] for rank in range(2)] == [[0, 8], [16, 24]]
    assert [shared.share(4, rank).start for rank in range(4)] == [0, 0, 8, 8]
    assert not Part(16, 2).divides(4) and shared.divides(4) and not shared.divides(3)
    cut = Cut("w", 0, (heads, shared, shared), 64 * 8)
    assert cut.ranges(2, 1) == [range(16, 32), range(40, 48), range(56, 64)]
    assert cut.local_numel(4) == (8 + 8 + 8) * 8


class Upside(transformers.LlamaConfig):
    """Of a model whose attention is followed by a norm over all heads."""

    model_type = "manta_test_upside"


class UpsideForCausalLM(transformers.LlamaForCausalLM):
    """The norm reads all heads, and so does each MLP's; layers also read the embedding."""

    config_class = Upside

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        for layer in self.model.layers:
            layer.self_attn.o_proj = nn.Sequential(nn.RMSNorm(32), nn.Linear(32, 32))
            layer.mlp.act_fn = nn.Softmax(-1)


def test_what_mixes_heads_or_inner_numbers_stays_whole(tmp_path: Path) -> None:
    """Nothing in the names says so; the trial does."""
    transformers.AutoConfig.register("manta_test_upside", Upside, exist_ok=True)
    transformers.AutoModelForCausalLM.register(Upside, UpsideForCausalLM, exist_ok=True)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "vocab_size": 64}
    config = Upside(num_attention_heads=4, num_key_value_heads=2, **sizes)
    UpsideForCausalLM(config).save_pretrained(tmp_path)
    layout = recording.record(tmp_path)
    assert layout.cuts == () and not any(call.is_divided for call in layout.calls)


class Skipping(transformers.LlamaConfig):
    """Of a model whose last layer reads the first one's result."""

    model_type = "manta_test_skipping"


class SkippingForCausalLM(transformers.LlamaForCausalLM):
    """The embedding is added behind the layers."""

    config_class = Skipping

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.model.register_forward_hook(self._add, with_kwargs=True)

    def _add(self, module: Any, args: Any, kwargs: Any, out: Any) -> Any:
        out.last_hidden_state = out.last_hidden_state + module.embed_tokens(kwargs["input_ids"])
        return out


def test_a_model_that_reads_its_embedding_again_has_no_stages(tmp_path: Path) -> None:
    transformers.AutoConfig.register("manta_test_skipping", Skipping, exist_ok=True)
    transformers.AutoModelForCausalLM.register(Skipping, SkippingForCausalLM, exist_ok=True)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "vocab_size": 64}
    SkippingForCausalLM(Skipping(num_attention_heads=4, **sizes)).save_pretrained(tmp_path)
    layout = recording.record(tmp_path)
    assert layout.not_staged == "its result isn't made of its last layer's alone"
    assert layout.cuts


YOUTU: dict[str, Any] = {
    "vocab_size": 64,
    "pad_token_id": 0,
    "tie_word_embeddings": True,
    "q_lora_rank": 24,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
}
"""A type whose code clears the padding token's row of a loaded embedding."""


@pytest.mark.parametrize("split", [(0, 2, 0, 1), (1, 2, 0, 1), (0, 1, 1, 2)])
def test_a_row_that_the_models_code_clears_is_cleared_in_every_ranks_head(
    tmp_path_factory: pytest.TempPathFactory, split: tuple[int, int, int, int]
) -> None:
    arch = ("YoutuForCausalLM", YOUTU)
    with made_when_asked(tmp_path_factory, {"youtu": arch}) as folders:
        config = ModelConfig.from_pretrained(folders["youtu"])
        whole = AutoModelForCausalLM.from_pretrained(folders["youtu"], dtype=torch.float32)
        parallel = ParallelState(*split)
        head = share_of(config, parallel).get_output_embeddings().weight
    table = whole.get_output_embeddings().weight
    assert table[0].count_nonzero() == 0 and table[1].count_nonzero()
    rows = len(table) // parallel.tp_size
    torch.testing.assert_close(head, table[parallel.tp_rank * rows :][:rows], atol=0, rtol=0)


def test_a_wrong_layout_is_noticed_when_a_rank_loads(
    folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A layout that says other heads than the weights are cut by."""
    layout = recording.record(folders["granite"])
    cuts = tuple(cut for cut in layout.cuts if ".k_proj." not in cut.name)
    calls = tuple(msgspec.structs.replace(call, num_kv_heads=4) for call in layout.calls)
    wrong = msgspec.structs.replace(layout, cuts=cuts, calls=calls)
    monkeypatch.setattr("engine.checkpoint.model_config.read_layout", lambda folder: wrong)
    parallel = ParallelState(0, 2, 0, 1)
    monkeypatch.setattr(ParallelState, "all_reduce", lambda self, tensor: tensor)
    with pytest.raises(ConfigError, match="GraniteForCausalLM can't run on"):
        make_runner(str(folders["granite"]), parallel=parallel)
