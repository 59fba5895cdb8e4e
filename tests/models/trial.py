"""A trial of one type: a tiny model of it through Manta's steps, beside transformers."""

from __future__ import annotations

import copy
import functools
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from engine.checkpoint.tried_types import TriedType
from engine.config import EngineConfig, ResolvedConfig
from engine.errors import ConfigError
from engine.layers.experts import is_experts
from engine.layers.grouped import can_quantize, quantize
from engine.models import recording
from engine.protocol.pooling import Pooling
from engine.protocol.sampling_params import SamplingParams
from engine.protocol.step import TokenLogprobs
from tests.models.ranks import Ranks
from tests.models.tiny_model import VOCAB, tiny_config, tiny_model
from tests.support.drafters import OUTPUTS
from tests.support.engines import engine_for

MAX_NEW = 12
MAX_LEN = 200
TOLERANCE = 1e-4
"""Of a log-probability, in float32."""
TYPES: dict[str, Any] = {**MODEL_FOR_CAUSAL_LM_MAPPING_NAMES}
_GREEDY = SamplingParams(max_tokens=MAX_NEW, temperature=0, ignore_eos=True, logprobs=1)
_RUNS: tuple[tuple[int, dict[str, Any]], ...] = (
    (1, {"chunked_prefill_size": -1}),
    (1, {"chunked_prefill_size": 16, "prefixes": True}),
    (16, {"chunked_prefill_size": 16, "prefixes": True, "enable_overlap": False}),
    (16, {"chunked_prefill_size": 16, "retract_every": 3}),
)
"""Page size, and how `Engine.run` is called. `prefixes`: the prompts have been seen before."""
_DRAFTER = "tests.support.drafters:RightUntilError"
_INT8_ROUNDING, _BFLOAT16_ROUNDING = 0.005, 0.2
"""How far log-probabilities may be in the mean: from those of weights rounded to int8, and in
bfloat16."""


def make_prompts() -> list[list[int]]:
    """Five, of which two begin with the same tokens; longer than windows and chunks."""
    generator = torch.Generator().manual_seed(5)

    def draw(count: int) -> list[int]:
        return torch.randint(3, VOCAB, (count,), generator=generator).tolist()

    first = draw(37)
    return [first, draw(19), first[:22] + draw(11), draw(5), draw(50)]


def try_type(kind: str, folder: Path, ranks: Ranks) -> TriedType:
    """Write a tiny model of the type to the folder and compare. `folder` is in no sentence."""
    named = TYPES[kind]
    class_name = named if isinstance(named, str) else named[0]

    def told(why: object) -> str:
        return " ".join(str(why).replace(str(folder), "the folder").split())

    def ended(state: Literal["refused", "wrong"], why: object) -> TriedType:
        return TriedType(type=kind, class_name=class_name, state=state, sentence=told(why))

    config = tiny_config(kind)
    with pytest.MonkeyPatch.context() as patch:
        # In this process: another would load torch for each type.
        record = functools.cache(recording.record)
        patch.setattr("engine.checkpoint.model_config.read_layout", record)
        try:
            model = _write(config, folder)
            resolved = EngineConfig(model=str(folder), max_model_len=MAX_LEN).resolve()
            found = _reference(model)
            if found is None:
                with engine_for(folder):  # has to refuse it
                    return ended("wrong", "transformers' forward contradicts itself")
            reference, expected, logprobs = found
            truth = _Truth(folder, resolved, model, expected, logprobs, ranks)
            for page in (1, 16):
                wrong = _differs(truth, page)
                if wrong and reference == "forward":
                    wrong += "; transformers' own generate differs from its forward, too"
                if wrong:
                    return ended("wrong", wrong)
        except ConfigError as error:
            return ended("refused", error)
        features: dict[str, str] = {}
        for name, differs in FEATURES.items():
            try:
                wrong = differs(truth)
            except ConfigError as error:
                features[name] = told(error)
                continue
            if wrong:
                return ended("wrong", f"{wrong} ({name})")
            features[name] = ""
    return TriedType(
        type=kind,
        class_name=class_name,
        state="native" if resolved.model.layout is None else "transformers",
        reference=reference,
        **features,
    )


def _write(config: Any, folder: Path) -> PreTrainedModel:
    """Write the folder as its users have it: the configuration may have parts besides the text
    model. Of a model that transformers can't build here, only config.json is written, and Manta has
    to refuse it."""
    config.save_pretrained(folder)
    loaded: Any = AutoModelForCausalLM
    try:
        model = tiny_model(config)
        model.save_pretrained(folder)
        if type(model.config) is not type(config):
            config.save_pretrained(folder)
        reference: PreTrainedModel = loaded.from_pretrained(folder, dtype=torch.float32)
    except Exception:  # the code of any model; Manta must have met it, too
        EngineConfig(model=str(folder), max_model_len=MAX_LEN).resolve()
        raise
    return reference.eval()


@dataclass
class _Truth:
    """A model's folder and what transformers makes of the prompts."""

    folder: Path
    resolved: ResolvedConfig
    model: PreTrainedModel
    expected: list[list[int]]
    logprobs: list[Tensor]
    ranks: Ranks

    @property
    def lines(self) -> list[list[int]]:
        """Prompts with the outputs behind them."""
        return [p + tokens for p, tokens in zip(make_prompts(), self.expected, strict=True)]


def _differs(truth: _Truth, page: int) -> str:
    """What Manta gives else than transformers; "" if it is the same."""
    prompts = make_prompts()
    with engine_for(truth.folder, page_size=page) as engine:
        for size, keys in _RUNS:
            if size != page:
                continue
            warm = prompts if keys.get("prefixes") else ()
            given = {key: value for key, value in keys.items() if key != "prefixes"}
            found = engine.run(prompts, _GREEDY, warm=warm, **given)
            if found != truth.expected:
                same = sum(a == b for a, b in zip(found, truth.expected, strict=True))
                return f"{same} of {len(prompts)} outputs are the same with page {page}, {keys}"
            error = _distance(engine.logprobs, truth.logprobs)
            if not error <= TOLERANCE:
                return f"log-probabilities differ by {error:.1e} with page {page}, {keys}"
    return ""


def _differs_divided(truth: _Truth, *, tp_size: int = 1, pp_size: int = 1) -> str:
    """What two ranks give else; "" if it is the same."""
    truth.resolved.model.check_split(tp_size, pp_size)
    lines = [line[:-1] for line in truth.lines]
    for found in truth.ranks.play(truth.folder, tp_size, pp_size, lines, MAX_NEW - 1):
        for rows, tokens, wanted in zip(found, truth.expected, truth.logprobs, strict=True):
            logits, chosen = rows[-MAX_NEW:].float(), torch.tensor(tokens)
            if not torch.equal(logits.argmax(-1), chosen):
                return "tokens differ"
            own = logits.log_softmax(-1).gather(1, chosen[:, None])[:, 0]
            error = float((own - wanted).abs().max())
            if not error <= TOLERANCE:
                return f"log-probabilities differ by {error:.1e}"
    return ""


def _differs_with_drafts(truth: _Truth) -> str:
    """What drafts change, of which some are right; "" if nothing."""
    outputs = truth.folder / "outputs.json"
    outputs.write_text(json.dumps(truth.lines))
    drafts = {"method": _DRAFTER, "num_speculative_tokens": 3, "draft_length": "fixed"}
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(OUTPUTS, str(outputs))
        with engine_for(truth.folder, page_size=16, speculative_config=drafts) as engine:
            found = engine.run(make_prompts(), _GREEDY, chunked_prefill_size=16, retract_every=3)
            if found != truth.expected:
                return "tokens differ"
            if not engine.stats.spec_decode_accepted_tokens_total:
                return "no draft was accepted"
            error = _distance(engine.logprobs, truth.logprobs)
            return "" if error <= TOLERANCE else f"log-probabilities differ by {error:.1e}"


def _differs_pooled(truth: _Truth) -> str:
    """How hidden states differ from the model's own; "" if they are the same."""
    prompts = make_prompts()
    kinds: list[Pooling | None] = ["last", "mean", None]
    with engine_for(truth.folder, page_size=16) as engine:
        found = engine.run(
            [prompt for prompt in prompts for _ in kinds],
            _GREEDY,
            pooling=kinds * len(prompts),
            chunked_prefill_size=16,
        )
    if found[2::3] != truth.expected:
        return "tokens beside embeddings differ"
    for number, prompt in enumerate(prompts):
        states = _states(truth.model, prompt)
        for kind, wanted in enumerate((states[-1], states.mean(0))):
            own = torch.tensor(engine.embeddings[3 * number + kind])
            error = float((own - wanted).norm() / wanted.norm())
            if not error <= TOLERANCE:
                return f"the embedding ({kinds[kind]}) differs by {error:.1e}"
    return ""


def _differs_in_int8(truth: _Truth) -> str:
    """What weights of a byte change else than rounding the model's own; "" if nothing."""
    found = _forced(truth, quantization="int8")
    return _far(found, _logprobs_of_lines(_rounded(truth.model), truth.lines), _INT8_ROUNDING)


def _differs_in_bfloat16(truth: _Truth) -> str:
    """What bfloat16 changes else than rounding; "" if nothing."""
    return _far(_forced(truth, dtype="bfloat16"), torch.stack(truth.logprobs), _BFLOAT16_ROUNDING)


def _forced(truth: _Truth, **config: Any) -> Tensor:
    """Log-probabilities [prompts, MAX_NEW] of the outputs, read as prompts."""
    params = SamplingParams(max_tokens=1, temperature=0, ignore_eos=True, prompt_logprobs=1)
    with engine_for(truth.folder, page_size=16, **config) as engine:
        engine.run(truth.lines, params, chunked_prefill_size=16)
    lines = [engine.prompt_logprobs[number] for number in range(len(truth.lines))]
    return torch.tensor([[e.logprob for e in line[-MAX_NEW:] if e] for line in lines])


def _logprobs_of_lines(model: PreTrainedModel, lines: list[list[int]]) -> Tensor:
    """The same by a model of transformers."""
    found = []
    for line in lines:
        rows = _forward(model, line)[-MAX_NEW - 1 : -1].log_softmax(-1)
        found.append(rows.gather(1, torch.tensor(line[-MAX_NEW:])[:, None])[:, 0])
    return torch.stack(found)


def _far(found: Tensor, wanted: Tensor, most: float) -> str:
    error = float((found - wanted).abs().mean())
    return "" if error <= most else f"log-probabilities differ by {error:.3f} in the mean"


def _rounded(model: PreTrainedModel) -> PreTrainedModel:
    """A copy whose matrices of linears and experts have 255 values in each group of inputs."""
    model = copy.deepcopy(model)

    def to_steps(weight: Tensor) -> Tensor:
        if not can_quantize(weight.shape[-1]):
            return weight
        rows = weight.reshape(-1, weight.shape[-1])
        return quantize(rows, 8).dequantize(weight.dtype).view(weight.shape)

    for module in list(model.modules()):
        if type(module) is torch.nn.Linear:
            module.weight = torch.nn.Parameter(to_steps(module.weight.data), False)
        elif is_experts(module):
            for weight in module.parameters(recurse=False):
                if weight.ndim == 3:
                    whole = weight.data
                    if module.is_transposed:
                        weight.data = to_steps(whole.transpose(1, 2)).transpose(1, 2).contiguous()
                    else:
                        weight.data = to_steps(whole)
    return model


FEATURES: dict[str, Callable[[_Truth], str]] = {
    "tp2": functools.partial(_differs_divided, tp_size=2),
    "pp2": functools.partial(_differs_divided, pp_size=2),
    "speculation": _differs_with_drafts,
    "embeddings": _differs_pooled,
    "int8": _differs_in_int8,
    "bfloat16": _differs_in_bfloat16,
}
"""By the name of what a `TriedType` says of it."""


def _distance(found: dict[int, list[TokenLogprobs]], logprobs: list[Tensor]) -> float:
    rows = [torch.tensor([entry.logprob for entry in found[i]]) for i in range(len(logprobs))]
    return max(float((a - b).abs().max()) for a, b in zip(rows, logprobs, strict=True))


def _reference(
    model: PreTrainedModel,
) -> tuple[Literal["generate", "forward"], list[list[int]], list[Tensor]] | None:
    """Greedy tokens of each prompt and their log-probabilities [MAX_NEW]: by `generate`, if that
    agrees with the forward of all tokens at once without a cache; else by this forward. None if
    that gives other tokens as the text grows."""
    prompts = make_prompts()
    for attention in ("eager", "sdpa"):
        recording.point_at(model, attention)
        try:
            outputs = [_generate(model, prompt) for prompt in prompts]
            expected = [tokens for tokens, _ in outputs]
            agrees = _logprobs(model, prompts, expected) is not None
        except Exception:  # the code of any model: the forward below has to do
            continue
        if agrees:
            return "generate", expected, [logprobs for _, logprobs in outputs]
    expected = [_greedy_by_forward(model, prompt) for prompt in prompts]
    logprobs = _logprobs(model, prompts, expected)
    return None if logprobs is None else ("forward", expected, logprobs)


def _generate(model: PreTrainedModel, prompt: list[int]) -> tuple[list[int], Tensor]:
    """Greedy tokens and their log-probabilities, as `generate` computes them step by step: some
    models' steps differ from their forward of all tokens by more than rounding."""
    ids = torch.tensor([prompt])
    with torch.inference_mode():
        out: Any = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            max_new_tokens=MAX_NEW,
            eos_token_id=None,
            pad_token_id=0,
            output_logits=True,
            return_dict_in_generate=True,
        )
    tokens: list[int] = out.sequences[0, len(prompt) :].tolist()
    rows = torch.cat(out.logits).float().log_softmax(-1)
    return tokens, rows.gather(1, torch.tensor(tokens)[:, None])[:, 0]


def _logprobs(
    model: PreTrainedModel, prompts: Sequence[list[int]], outputs: Sequence[list[int]]
) -> list[Tensor] | None:
    """Log-probabilities of greedy outputs; None if the forward would choose others."""
    found = []
    for prompt, tokens in zip(prompts, outputs, strict=True):
        rows = _forward(model, prompt + tokens)[len(prompt) - 1 : -1].log_softmax(-1)
        chosen = torch.tensor(tokens)
        if not torch.equal(rows.argmax(-1), chosen):
            return None
        found.append(rows.gather(1, chosen[:, None])[:, 0])
    return found


def _greedy_by_forward(model: PreTrainedModel, prompt: list[int]) -> list[int]:
    ids = list(prompt)
    for _ in range(MAX_NEW):
        ids.append(int(_forward(model, ids)[-1].argmax()))
    return ids[len(prompt) :]


def _forward(model: PreTrainedModel, ids: list[int]) -> Tensor:
    """float32 [len(ids), vocab]"""
    with torch.inference_mode():
        logits: Tensor = model(**_given(model, ids)).logits[0]
    return logits.float()


def _states(model: PreTrainedModel, ids: list[int]) -> Tensor:
    """float32 [len(ids), hidden] behind the final norm"""
    decoders = (model.base_model, model.get_decoder(), *model.children())
    decoder: Any = next(found for found in decoders if found is not model)
    with torch.inference_mode():
        states: Tensor = decoder(**_given(model, ids)).last_hidden_state[0]
    return states.float()


def _given(model: PreTrainedModel, ids: list[int]) -> dict[str, Any]:
    """The arguments of a forward."""
    given: dict[str, Any] = {"input_ids": torch.tensor([ids]), "use_cache": False}
    padding = getattr(model.config.get_text_config(decoder=True), "pad_token_id", None)
    if padding in ids:
        given |= _behind_padding(model, len(ids), padding)
    return given


def _behind_padding(model: PreTrainedModel, count: int, padding: int) -> dict[str, Tensor]:
    """The positions of a text of `count` tokens, for a model that counts from behind its padding
    token and would take one that it has chosen itself for padding; {} for others."""
    ids = torch.full((1, count), padding + 1)
    positions = torch.arange(count)[None] + padding + 1
    own = model(input_ids=ids, use_cache=False).logits
    try:
        found = model(input_ids=ids, position_ids=positions, use_cache=False).logits
    except (TypeError, IndexError):  # it takes none, or has no such one
        return {}
    return {"position_ids": positions} if torch.allclose(own, found, atol=1e-5) else {}
