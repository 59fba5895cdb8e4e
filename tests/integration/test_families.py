"""What requests ask for gives the same with and without drafts, in one go or begun elsewhere, for
each family that transformers' code computes. `make test` runs two, `make test-matrix` all."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import transformers

from engine.constraints import ConstraintSpec, structured
from engine.models import recording
from engine.protocol.sampling_params import SamplingParams
from tests.support.drafters import OUTPUTS
from tests.support.engines import engine_for, greedy_reference, load_reference
from tests.support.families import FAMILIES, make_family

SUBSET = ("gemma3", "qwen3_moe")
MAX_NEW = 24
SHARED = [7 + 5 * i % 190 for i in range(40)]
SCHEMA = {
    "type": "object",
    "properties": {"name": {"enum": ["Ada", "Bob"]}, "age": {"type": "integer"}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
PARAMS = {
    "greedy": SamplingParams(max_tokens=MAX_NEW, temperature=0, ignore_eos=True, logprobs=2),
    "sampled": SamplingParams(max_tokens=MAX_NEW, seed=5, ignore_eos=True),
    "top_p": SamplingParams(max_tokens=MAX_NEW, temperature=0.5, top_p=0.8, seed=1),
    "penalties": SamplingParams(max_tokens=MAX_NEW, temperature=0, repetition_penalty=1.3),
    "schema": SamplingParams(
        max_tokens=48,
        temperature=0,
        logprobs=1,
        constraint=structured.json_schema(SCHEMA, any_whitespace=False),
    ),
    "regex": SamplingParams(
        max_tokens=40, seed=4, ignore_eos=True, constraint=structured.regex("[ab] end of it all")
    ),
    "choice": SamplingParams(
        max_tokens=MAX_NEW,
        temperature=0,
        constraint=ConstraintSpec("token_choice", {"choices": [[40, 41, 42], [40, 41, 50]]}),
    ),
}
NAMES = list(PARAMS)


@pytest.mark.parametrize("name", FAMILIES)
def test_drafts_grammars_and_resume(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str
) -> None:
    if name not in SUBSET and not request.config.getoption("--full-matrix"):
        pytest.skip("not in the covering subset (make test-matrix runs it)")
    transformers.utils.logging.set_verbosity_error()
    monkeypatch.setattr("engine.checkpoint.model_config.read_layout", recording.record)
    folder = make_family(tmp_path / "model", name)
    prompts = [SHARED + [9 + i] * (1 + 3 * i) for i in range(len(NAMES))]
    params = [PARAMS[name] for name in NAMES]
    with engine_for(folder, page_size=16) as plain:
        want = plain.run(prompts, params, chunked_prefill_size=32)
        logprobs = plain.logprobs
        reference = load_reference(folder)
        assert [want[0]] == greedy_reference(reference, prompts[:1], MAX_NEW)
        schema = want[NAMES.index("schema")]
        assert len(schema) <= 48 and want[NAMES.index("choice")][:2] == [40, 41]
        known = [p + list(out) for p, out in zip(prompts, want, strict=True)]
        outputs = tmp_path / "outputs.json"
        outputs.write_text(json.dumps(known))
        monkeypatch.setenv(OUTPUTS, str(outputs))
        drafts = {
            "method": "tests.support.drafters:RightUntilError",
            "num_speculative_tokens": 4,
            "draft_length": "fixed",
        }
        with engine_for(folder, page_size=16, speculative_config=drafts) as engine:
            for overlap, chunk in ((True, 32), (False, -1)):
                keys = {"enable_overlap": overlap, "chunked_prefill_size": chunk}
                found = engine.run(prompts, params, retract_every=7, **keys)
                assert dict(zip(NAMES, found, strict=True)) == dict(zip(NAMES, want, strict=True))
                assert engine.stats.spec_decode_accepted_tokens_total > 20
                for rid, entries in logprobs.items():
                    for mine, other in zip(engine.logprobs[rid], entries, strict=True):
                        assert mine.logprob == pytest.approx(other.logprob, abs=1e-4)
            for first, second in ((engine, plain), (plain, engine)):
                until = {i: 1 + 3 * i % (len(out) - 1) for i, out in enumerate(want)}
                begun = first.run(prompts, params, stop_after=until)
                rest = second.run(prompts, params, resumed=begun)
                assert [a + b for a, b in zip(begun, rest, strict=True)] == want
