"""Parts of models of transformers that our kernels compute: those that compute the same."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

from engine.checkpoint.model_config import ModelConfig
from engine.config import KernelChoice
from engine.device.distributed import ParallelState
from engine.layers.fused_ops import CpuOps
from engine.models import recording
from engine.models.parts import Chain, Norm
from engine.models.takeover import Takeover
from engine.models.transformers_model import TransformersModel
from engine.native import library
from tests.support.models import THROUGH_TRANSFORMERS, make_model
from tests.support.step_driver import make_runner

pytestmark = pytest.mark.skipif(library.load() is None, reason="needs the CPU kernels")
LLAMA: tuple[str, dict[str, Any]] = ("LlamaForCausalLM", {})


@pytest.fixture(autouse=True)
def in_this_process(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    transformers.utils.logging.set_verbosity_error()
    monkeypatch.setattr("engine.checkpoint.model_config.read_layout", recording.record)
    return


def taken(
    folder: Path, monkeypatch: pytest.MonkeyPatch, **changes: Any
) -> tuple[dict[str, int], bool]:
    """How many of a model's parts of each kind are ours, and whether the last layer skips.
    `changes` are `make_runner`'s."""
    read = ModelConfig.from_pretrained
    monkeypatch.setattr(
        ModelConfig, "from_pretrained", lambda path: read(path, impl="transformers")
    )
    runner = make_runner(str(folder), kernels=KernelChoice("cpu", "cpu", "cpu"), **changes)
    model = runner.model
    assert isinstance(model, TransformersModel)
    kinds: dict[str, int] = {}
    for module in model.decoder.modules():
        ours = module if isinstance(module, Norm) else getattr(module.forward, "__self__", module)
        if ours is not module or isinstance(module, Norm):
            kinds[type(ours).__name__] = kinds.get(type(ours).__name__, 0) + 1
    if model.chain is not None:
        kinds["Chain"] = 1
    return kinds, model.skips_unread


@pytest.mark.parametrize(
    ("name", "expected", "skips"),
    [
        ("llama", {"Norm": 7, "GatedBlock": 3, "Attention": 3, "Layer": 3, "Chain": 1}, True),
        ("qwen3_moe", {"Norm": 13, "Mixture": 3, "Attention": 3, "Layer": 3, "Chain": 1}, True),
        ("granite", {"Norm": 7, "GatedBlock": 3, "Attention": 3}, False),
        ("olmo2", {"Norm": 13, "GatedBlock": 3}, False),
        ("gemma2", {"Norm": 13, "Attention": 3}, False),
        ("gpt_neox", {}, False),
    ],
)
def test_which_parts_are_ours(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    expected: dict[str, int],
    skips: bool,
) -> None:
    """Granite scales what layers add; OLMo 2 has norms over all heads and behind the blocks."""
    arch, keys = THROUGH_TRANSFORMERS.get(name, LLAMA)
    assert taken(make_model(tmp_path, arch, **keys), monkeypatch) == (expected, skips)


@pytest.mark.parametrize(
    ("place", "factor", "dtype"),
    [
        ("embed_tokens", 3.0, "float32"),
        ("embed_tokens", 1.02, "bfloat16"),
        ("layers.1", 1.02, "bfloat16"),
        ("norm", 1.02, "bfloat16"),
    ],
)
def test_a_decoder_that_does_more_is_no_chain(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str, factor: float, dtype: str
) -> None:
    """Something behind a module, which is none itself and happens in place; of a whole model in 16
    bits the numbers alone would not show it."""
    from transformers.models.llama.modeling_llama import LlamaModel

    own = LlamaModel.forward

    @functools.wraps(own)
    def scaled(self: Any, *args: Any, **kwargs: Any) -> Any:
        module = self.get_submodule(place)
        hook = module.register_forward_hook(lambda *call: call[2].mul_(factor))
        try:
            return own(self, *args, **kwargs)
        finally:
            hook.remove()

    monkeypatch.setattr(LlamaModel, "forward", scaled)
    kinds, _ = taken(make_model(tmp_path, "LlamaForCausalLM"), monkeypatch, dtype=dtype)
    assert "Chain" not in kinds and kinds["Layer"] == 3


def test_a_module_between_the_layers_is_no_chain(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers.models.llama.modeling_llama import LlamaModel

    own = LlamaModel.__init__

    def with_more(self: Any, config: Any) -> None:
        own(self, config)
        self.norm = nn.Sequential(self.norm, nn.Hardtanh(-50.0, 50.0))

    monkeypatch.setattr(LlamaModel, "__init__", with_more)
    folder = make_model(tmp_path, "LlamaForCausalLM")
    kinds, _ = taken(folder, monkeypatch)
    assert kinds == {"Norm": 7, "GatedBlock": 3, "Attention": 3, "Layer": 3}


@pytest.mark.parametrize("pp_rank", range(3))
def test_every_stage_is_a_chain(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pp_rank: int
) -> None:
    folder = make_model(tmp_path, "LlamaForCausalLM")
    stage = ParallelState(0, 1, pp_rank, 3)
    kinds, _ = taken(folder, monkeypatch, parallel=stage, dtype="bfloat16")
    assert (kinds["Layer"], kinds["Chain"]) == (1, 1)


def test_a_scale_of_far_positions_keeps_attentions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ministral 3 scales queries from position 16,384 on, at first by little."""
    rope = {
        "rope_type": "yarn",
        "rope_theta": 1e6,
        "factor": 16.0,
        "original_max_position_embeddings": 16384,
        "llama_4_scaling_beta": 0.1,
    }
    folder = make_model(
        tmp_path,
        "Ministral3ForCausalLM",
        hidden_size=256,
        head_dim=128,
        max_position_embeddings=262144,
        rope_parameters=rope,
    )
    kinds, _ = taken(folder, monkeypatch, dtype="bfloat16", max_model_len=20000)
    assert "Attention" not in kinds and "Chain" not in kinds


def test_what_else_reads_a_layers_input_keeps_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Our layers overwrite their input. Where that shows, they go again."""
    from transformers.models.llama.modeling_llama import LlamaModel

    own = LlamaModel.forward

    @functools.wraps(own)
    def with_embeddings(self: Any, *args: Any, **kwargs: Any) -> Any:
        seen: list[Tensor] = []
        hook = self.embed_tokens.register_forward_hook(lambda *call: seen.append(call[2]))
        out = own(self, *args, **kwargs)
        hook.remove()
        out.last_hidden_state = out.last_hidden_state + seen[0]
        return out

    monkeypatch.setattr(LlamaModel, "forward", with_embeddings)
    folder = make_model(tmp_path, "LlamaForCausalLM")
    assert taken(folder, monkeypatch) == ({"Norm": 7, "GatedBlock": 3, "Attention": 3}, False)


class Shifted(nn.Module):
    """A norm with something more."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(8)), 1e-5

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.rms_norm(x, (8,), self.weight, self.eps) + 1e-3


class Clamped(Shifted):
    """One that keeps small inputs small."""

    def forward(self, x: Tensor) -> Tensor:
        return x * (x.pow(2).mean(-1, keepdim=True).clamp(min=1e-4) + self.eps).rsqrt()


class Plain(Shifted):
    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.rms_norm(x, (8,), self.weight, self.eps)


@pytest.mark.parametrize(("kind", "is_ours"), [(Shifted, False), (Clamped, False), (Plain, True)])
def test_a_norm_is_ours_only_if_it_gives_the_same(kind: type[Shifted], is_ours: bool) -> None:
    class Step:
        calls = 0
        sampled = None

    decoder = nn.Sequential(kind())

    def run(num_positions: int, chain: Chain | None) -> Tensor:
        return torch.as_tensor(decoder(torch.ones(1, 3, 8))[0])

    takeover = Takeover(decoder, Step(), CpuOps(), [], run, (1, 1), is_last_stage=True)
    takeover.replace()
    assert isinstance(decoder[0], Norm) == is_ours
