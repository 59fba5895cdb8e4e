"""A trial of one type: a tiny model of it through Manta's steps, beside transformers."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from engine.checkpoint.tried_types import TriedType
from engine.config import EngineConfig
from engine.errors import ConfigError
from engine.models import recording
from engine.protocol.sampling_params import SamplingParams
from engine.protocol.step import TokenLogprobs
from tests.models.ranks import Ranks
from tests.models.tiny_model import VOCAB, tiny_config, tiny_model
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
_SPLITS = ((2, 1), (1, 2))
"""`tp_size` and `pp_size`."""


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
            for page in (1, 16):
                wrong = _differs(folder, page, expected, logprobs)
                if wrong and reference == "forward":
                    wrong += "; transformers' own generate differs from its forward, too"
                if wrong:
                    return ended("wrong", wrong)
        except ConfigError as error:
            return ended("refused", error)
    model_config, divided = resolved.model, []
    for sizes in _SPLITS:
        try:
            model_config.check_split(*sizes)
            wrong = _differs_divided(ranks, folder, sizes, expected, logprobs)
        except ConfigError as error:
            divided.append(told(error))
            continue
        if wrong:
            return ended("wrong", wrong)
        divided.append("")
    return TriedType(
        type=kind,
        class_name=class_name,
        state="native" if model_config.layout is None else "transformers",
        reference=reference,
        tp2=divided[0],
        pp2=divided[1],
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


def _differs(folder: Path, page: int, expected: list[list[int]], logprobs: list[Tensor]) -> str:
    """What Manta gives else than `expected`; "" if it is the same."""
    prompts = make_prompts()
    with engine_for(folder, page_size=page) as engine:
        for size, keys in _RUNS:
            if size != page:
                continue
            warm = prompts if keys.get("prefixes") else ()
            given = {key: value for key, value in keys.items() if key != "prefixes"}
            found = engine.run(prompts, _GREEDY, warm=warm, **given)
            if found != expected:
                same = sum(a == b for a, b in zip(found, expected, strict=True))
                return f"{same} of {len(prompts)} outputs are the same with page {page}, {keys}"
            error = _distance(engine.logprobs, logprobs)
            if not error <= TOLERANCE:
                return f"log-probabilities differ by {error:.1e} with page {page}, {keys}"
    return ""


def _differs_divided(
    ranks: Ranks,
    folder: Path,
    sizes: tuple[int, int],
    expected: list[list[int]],
    logprobs: list[Tensor],
) -> str:
    """What two ranks give else than `expected`; "" if it is the same."""
    pairs = list(zip(make_prompts(), expected, strict=True))
    lines = [prompt + tokens[:-1] for prompt, tokens in pairs]
    words = "tp_size {}, pp_size {}".format(*sizes)
    for found in ranks.play(folder, *sizes, lines, MAX_NEW - 1):
        for rows, tokens, wanted in zip(found, expected, logprobs, strict=True):
            logits, chosen = rows[-MAX_NEW:].float(), torch.tensor(tokens)
            if not torch.equal(logits.argmax(-1), chosen):
                return f"tokens differ with {words}"
            own = logits.log_softmax(-1).gather(1, chosen[:, None])[:, 0]
            error = float((own - wanted).abs().max())
            if not error <= TOLERANCE:
                return f"log-probabilities differ by {error:.1e} with {words}"
    return ""


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
    given: dict[str, Any] = {"input_ids": torch.tensor([ids]), "use_cache": False}
    with torch.inference_mode():
        padding = getattr(model.config.get_text_config(decoder=True), "pad_token_id", None)
        if padding in ids:
            given |= _behind_padding(model, len(ids), padding)
        logits: Tensor = model(**given).logits[0]
    return logits.float()


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
