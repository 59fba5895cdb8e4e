"""Constrained outputs of the carried model, sampled at temperature 1: each is what was asked for,
alone and beside others, with overlap and without, after retraction and after a resume."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jsonschema
import numpy as np
import pytest

from engine import LLM, SamplingParams, structured
from engine.constraints import ConstraintSpec
from engine.errors import RequestError
from engine.protocol.messages import AddRequest
from tests.support.grammars import EOS, MODEL, small_tokenizer, text_of
from tests.support.random_schemas import check_json, random_schema
from tests.support.requests import add_request

POINT = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "x": {"type": "integer", "minimum": -99, "maximum": 99},
        "tags": {"type": "array", "items": {"enum": ["a", "b", "naïve"]}, "maxItems": 3},
        "ok": {"type": ["boolean", "null"]},
    },
    "required": ["name", "x", "tags", "ok"],
    "additionalProperties": False,
}
SUM = """
start: NUMBER ("+" NUMBER){0,5}
NUMBER: /[1-9][0-9]{0,3}/
"""
TAGS = {
    "structures": [{"begin": "<p>", "schema": {"type": "integer"}, "end": "</p>"}],
    "triggers": ["<p>"],
}


def check_point(text: str) -> None:
    jsonschema.validate(json.loads(text), POINT)


def check_regex(text: str) -> None:
    assert re.fullmatch(r"[A-Z][a-z]{2,8}-\d{3}", text), text


def check_choice(text: str) -> None:
    assert text in ("yes", "no", "no way")


def check_sum(text: str) -> None:
    assert re.fullmatch(r"[1-9]\d{0,3}(\+[1-9]\d{0,3}){0,5}", text), text


def check_object(text: str) -> None:
    assert isinstance(json.loads(text), dict)


KINDS: list[tuple[ConstraintSpec, Callable[[str], None]]] = [
    (structured.json_schema(POINT, any_whitespace=False), check_point),
    (structured.regex(r"[A-Z][a-z]{2,8}-\d{3}"), check_regex),
    (structured.choice(["yes", "no", "no way"]), check_choice),
    (structured.grammar(SUM), check_sum),
]


def params(spec: ConstraintSpec | None, seed: int, **more: Any) -> SamplingParams:
    return SamplingParams(temperature=1.0, max_tokens=160, seed=seed, constraint=spec, **more)


@pytest.fixture(scope="module", params=[True, False], ids=["overlap", "normal"])
def llm(request: pytest.FixtureRequest) -> Iterator[LLM]:
    overlap = bool(request.param)
    with LLM(str(MODEL), max_total_tokens=4096, cpu_threads=1, enable_overlap=overlap) as made:
        yield made


def generate(llm: LLM, given: Sequence[SamplingParams]) -> list[tuple[str, list[int], str | None]]:
    outs = llm.generate([f"def f{i}(" for i in range(len(given))], list(given), use_tqdm=False)
    return [(o.outputs[0].text, o.outputs[0].token_ids, o.outputs[0].finish_reason) for o in outs]


def test_alone_and_beside_others_the_same(llm: LLM) -> None:
    free = SamplingParams(temperature=1.0, max_tokens=40, seed=7, ignore_eos=True)
    mixed: list[SamplingParams] = []
    checks: list[Callable[[str], None] | None] = []
    for i in range(24):
        spec, check = KINDS[i % len(KINDS)]
        mixed += [params(spec, i), free]
        checks += [check, None]
    together = generate(llm, mixed)
    for (text, ids, reason), check in zip(together, checks, strict=True):
        if check is not None:
            check(text)
            assert reason == "stop" and ids[-1] in EOS
    prompts = [f"def f{i}(" for i in range(len(mixed))]
    for i in (0, 1, 2, 4, 6, 20, 21):
        (alone,) = llm.generate(prompts[i], mixed[i], use_tqdm=False)
        assert alone.outputs[0].token_ids == together[i][1]


def test_outputs_of_random_schemas_finish_and_validate(
    request: pytest.FixtureRequest, llm: LLM
) -> None:
    """Strings, names and numbers of these schemas may be endless; the rest ends in any case."""
    count = 320 if request.node.callspec.id == "overlap" else 100
    schemas = [random_schema(random.Random(seed)) for seed in range(count)]
    given = [
        SamplingParams(
            temperature=1.0, max_tokens=512, seed=i, constraint=structured.json_schema(schema)
        )
        for i, schema in enumerate(schemas)
    ]
    free = SamplingParams(temperature=1.0, max_tokens=512, seed=7)
    outs = generate(llm, [*given, *[free] * 16])[: len(schemas)]
    finished = [
        (text, s) for (text, _, reason), s in zip(outs, schemas, strict=True) if reason == "stop"
    ]
    assert len(finished) >= 0.9 * len(schemas)
    for text, schema in finished:
        check_json(text, schema)


def test_without_eos_the_output_ends_where_it_is_complete(llm: LLM) -> None:
    given = [params(spec, seed, ignore_eos=True) for seed, (spec, _) in enumerate(KINDS * 4)]
    for (text, ids, reason), (_, check) in zip(generate(llm, given), KINDS * 4, strict=True):
        check(text)
        assert reason == "stop" and not set(ids) & set(EOS)


def test_any_json_object_ends_or_is_cut_by_max_tokens(llm: LLM) -> None:
    spec = structured.json_object(any_whitespace=False)
    given = [params(spec, seed) for seed in range(12)]
    outs = generate(llm, given)
    ended = [text for text, _, reason in outs if reason == "stop"]
    assert ended
    for text in ended:
        check_object(text)
    assert all(text.startswith("{") for text, _, _ in outs)


def test_structures_in_free_text(llm: LLM) -> None:
    spec = structured.structural_tag(TAGS)
    given = [params(spec, seed) for seed in range(6)]
    given += [params(spec, 99, logit_bias={t: 60.0}) for t in small_tokenizer().encode("<")[-1:]]
    for text, _, reason in generate(llm, given):
        found = re.findall("<p>(.*?)(</p>|$)", text, re.S)
        for inner, end in found:
            assert re.fullmatch(r"\s*-?\d*\s*", inner) if end else reason == "length"


def test_copies_of_one_prompt(llm: LLM) -> None:
    spec, check = KINDS[0]
    (out,) = llm.generate("x", params(spec, 3, n=6), use_tqdm=False)
    assert len({o.text for o in out.outputs}) > 1
    for sequence in out.outputs:
        check(sequence.text)


def test_other_limits_hold_too(llm: LLM) -> None:
    """Masks of a grammar and of a filter are combined; penalties and bias choose among the rest."""
    tokenizer = small_tokenizer()
    forbidden = [tokenizer.encode(text, add_special_tokens=False) for text in ("7", "77", "3")]
    given = [
        params(
            structured.regex(r"\d{6}"),
            seed,
            bad_words_ids=[ids for ids in forbidden if len(ids) == 1],
            frequency_penalty=1.0,
            logprobs=2,
        )
        for seed in range(8)
    ]
    for text, _, _ in generate(llm, given):
        assert re.fullmatch(r"\d{6}", text)


def drive(llm: LLM, requests: Sequence[AddRequest], retract_every: int = 0) -> list[list[int]]:
    """Tokens of requests with rids from 0. Every nth step sends a running one back to the queue."""
    scheduler = llm.core.scheduler
    for request in requests:
        scheduler.add(request, llm.core.clock())
    tokens: list[list[int]] = [[] for _ in requests]
    step = 0
    while not scheduler.is_idle:
        step += 1
        for _, out in llm.core.step():
            for rid, token in zip(out.rids, out.token_ids, strict=True):
                tokens[rid].append(token)
            assert all(end.reason == "stop" for end in out.finished), out.finished
        if retract_every and step % retract_every == 0:
            running = [r for m in scheduler.micro_batches for r in m.running.reqs]
            if running:
                scheduler.requests.retract(running[step % len(running)])
    return tokens


def test_retraction_in_the_middle(llm: LLM) -> None:
    """The grammar's state stays with the request: the tokens are those of an undisturbed run."""
    requests = [
        add_request(i, [10 + i, 20, 30], params(KINDS[i % 4][0] if i % 3 else None, i))
        for i in range(18)
    ]
    for request in requests:
        if request.sequence.params.constraint is None:
            request.sequence.params = SamplingParams(
                max_tokens=30, seed=1, stop_token_ids=[*range(500)]
            )
    before = drive(llm, requests)
    for every in (2, 3, 7):
        assert drive(llm, requests, every) == before
    for i, tokens in enumerate(before):
        if i % 3:
            KINDS[i % 4][1](text_of([t for t in tokens if t not in EOS]))


@pytest.mark.parametrize("kind", range(len(KINDS)))
def test_resume_goes_on_in_the_grammar(llm: LLM, kind: int) -> None:
    """`AddRequest.output_ids`: the scheduler advances the grammar by what was emitted elsewhere."""
    spec, check = KINDS[kind]
    prompt = small_tokenizer().encode("def f(")
    (whole,) = llm.generate(prompt, params(spec, 5), use_tqdm=False)
    ids = whole.outputs[0].token_ids
    for cut in {1, len(ids) // 2, len(ids) - 1} - {0}:
        emitted = np.asarray(ids[:cut], np.int32)
        again = add_request(0, prompt, params(spec, 5), output_ids=emitted)
        assert ids[:cut] + drive(llm, [again])[0] == ids
    check(text_of([t for t in ids if t not in EOS]))


def test_wrong_grammars_are_refused_before_anything_runs(llm: LLM) -> None:
    for wrong, words in (
        (structured.regex("(a"), "unclosed group"),
        (structured.json_schema({"type": "x"}), "Invalid type"),
        (structured.json_schema({"$ref": "#"}), "no output"),
    ):
        with pytest.raises(RequestError, match=words) as refused:
            generate(llm, [params(None, 0), params(wrong, 1)])
        assert refused.value.status == 400
        assert llm.core.scheduler.is_idle
    check_choice(generate(llm, [params(KINDS[2][0], 1)])[0][0])


def test_a_grammar_that_fails_while_it_runs_fails_its_request_alone(llm: LLM) -> None:
    """The guard lets it pass: it needs many tokens to reach the limits."""
    spec = structured.regex("b{300}((a{0,1000}){0,1000}){0,1000}")
    given = params(spec, 1, ignore_eos=True)
    given.max_tokens = 1000
    try:
        (text, _, reason), *_ = generate(llm, [given])
    except RequestError as error:
        assert error.status == 400 and "too complex" in error.message
    else:
        pytest.fail(f"it ends with {reason}: {text[:100]}")
    check_choice(generate(llm, [params(KINDS[2][0], 1)])[0][0])


def test_model_without_tokenizer(tmp_path: Any) -> None:
    """Token ids in and out; a grammar is refused."""
    for path in MODEL.iterdir():
        if path.name in ("config.json", "model.safetensors", "generation_config.json"):
            (tmp_path / path.name).symlink_to(path)
    with LLM(str(tmp_path), max_total_tokens=512, cpu_threads=1) as llm:
        (out,) = llm.generate([5, 6, 7], SamplingParams(max_tokens=3), use_tqdm=False)
        assert len(out.outputs[0].token_ids) >= 1
        with pytest.raises(RequestError, match="tokenizer"):
            llm.generate([5, 6, 7], params(KINDS[0][0], 0), use_tqdm=False)
