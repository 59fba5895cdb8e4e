"""Fields that leave no token together: a complete output ends, the others are refused."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from msgspec import structs

from deploy.http.parsers.tool_format import TOOL_FORMATS
from engine import LLM, SamplingParams
from engine.constraints import ConstraintSpec, structured
from engine.errors import RequestError
from tests.support.grammars import EOS, MODEL, small_tokenizer


def ids(text: str) -> list[int]:
    return small_tokenizer().encode(text, add_special_tokens=False)


CONSTRAINTS: dict[str, tuple[ConstraintSpec | None, str]] = {
    "none": (None, ".*"),
    "choice": (structured.choice(["yes", "no", "yes sir"]), "yes|no|yes sir"),
    "regex": (structured.regex("(ab){1,3}"), "(ab){1,3}"),
    "open": (structured.regex("a+b?"), "a+b?"),
    "schema": (structured.json_schema({"enum": ["x", "y"]}), '"[xy]"'),
    "lark": (structured.grammar('start: "x" start | "y"'), "x*y"),
    "tools": (
        TOOL_FORMATS["hermes"].constraint(
            {"f": {"type": "object", "properties": {"a": {"enum": [1]}}, "required": ["a"],
                   "additionalProperties": False}},
            may_answer=False,
            parallel=True,
        ),
        r'(\s*<tool_call>\s*\{"name": "f", "arguments": \{\s*"a"\s*:\s*1\s*\}\}\s*</tool_call>)+',
    ),
}  # fmt: skip
TOKENS = sorted(
    {token for text in ("yes no yes sir", "ababab", '"x" "y"', "aab", "xxy") for token in ids(text)}
)


@pytest.fixture(scope="module", params=[None, {"method": "ngram", "num_speculative_tokens": 3}])
def llm(request: pytest.FixtureRequest) -> Iterator[LLM]:
    with LLM(
        str(MODEL), max_total_tokens=2048, cpu_threads=1, speculative_config=request.param
    ) as running:
        yield running


def run_all(llm: LLM, **fields: Any) -> list[Any]:
    params = SamplingParams(**{"max_tokens": 12, "temperature": 0} | fields)
    (result,) = llm.generate("def ", params, use_tqdm=False)
    return list(result.outputs)


def run(llm: LLM, **fields: Any) -> Any:
    return run_all(llm, **fields)[0]


def test_a_finished_grammar_ends_the_output(llm: LLM) -> None:
    for name in ("choice", "regex", "schema"):
        spec, pattern = CONSTRAINTS[name]
        output = run(llm, constraint=spec, min_tokens=12)
        assert output.finish_reason == "stop" and re.fullmatch(pattern, output.text), output
    # eos is not among the allowed tokens, and the choice is complete.
    output = run(llm, constraint=structured.choice(["yes"]), allowed_token_ids=ids("yes"))
    assert (output.text, output.finish_reason) == ("yes", "stop")


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"constraint": structured.choice(["yes"]), "allowed_token_ids": [7]}, "allowed_token_ids"),
        ({"allowed_token_ids": [7], "bad_words_ids": [[7]]}, "allowed_token_ids and bad_words"),
        ({"allowed_token_ids": list(EOS), "min_tokens": 3}, "min_tokens and allowed_token_ids"),
        (
            {"allowed_token_ids": [7], "stop_token_ids": [7], "min_tokens": 1},
            "^min_tokens and stop_token_ids and allowed_token_ids leave",
        ),
        (
            {"allowed_token_ids": [7], "bad_words_ids": [[7]], "min_tokens": 1},
            "^allowed_token_ids and bad_words leave",
        ),
        (
            {
                "constraint": structs.replace(structured.choice(["yes"]), field="guided_choice"),
                "allowed_token_ids": [7],
            },
            "^allowed_token_ids and guided_choice leave",
        ),
        (
            {"constraint": structured.regex("[ab]+"),
             "bad_words_ids": [[token] for token in range(4096) if token not in EOS]},
            "bad_words and the grammar",
        ),
    ],
)  # fmt: skip
def test_an_empty_set_is_refused_by_name(llm: LLM, fields: dict[str, Any], words: str) -> None:
    with pytest.raises(RequestError, match=words) as refused:
        run(llm, **fields)
    assert refused.value.status == 400
    assert llm.core.scheduler.is_idle
    assert run(llm).finish_reason  # the engine goes on


@settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    name=st.sampled_from(list(CONSTRAINTS)),
    min_tokens=st.integers(0, 12),
    allowed=st.none() | st.lists(st.sampled_from([*TOKENS, *EOS]), min_size=1, max_size=12),
    bad=st.lists(st.lists(st.sampled_from(TOKENS), min_size=1, max_size=2), max_size=3),
    stops=st.lists(st.sampled_from(TOKENS), max_size=2),
    biased=st.lists(st.sampled_from(TOKENS), max_size=6),
    ignore_eos=st.booleans(),
    n=st.sampled_from([1, 3]),
    temperature=st.sampled_from([0.0, 1.0]),
)
def test_no_combination_is_a_fault_of_the_server(
    llm: LLM, name: str, min_tokens: int, allowed: list[int] | None, bad: list[list[int]],
    stops: list[int], biased: list[int], ignore_eos: bool, n: int,
    temperature: float,
) -> None:  # fmt: skip
    spec, pattern = CONSTRAINTS[name]
    fields: dict[str, Any] = {
        "constraint": spec, "min_tokens": min_tokens, "allowed_token_ids": allowed,
        "bad_words_ids": bad, "stop_token_ids": stops, "ignore_eos": ignore_eos,
        "logit_bias": dict.fromkeys(biased, -100.0), "temperature": temperature, "seed": 1, "n": n,
        "skip_special_tokens": False, "max_tokens": 12 if name != "tools" else 60,
    }  # fmt: skip
    try:
        outputs = run_all(llm, **fields)
    except RequestError as error:
        assert error.status == 400 and re.search("leaves? no token", error.message), error
        return
    finally:
        assert llm.core.scheduler.is_idle
    assert len(outputs) == n
    for output in outputs:
        assert output.finish_reason in ("stop", "length")
        if allowed is not None:
            assert set(output.token_ids) <= set(allowed)
        stopped = bool(output.token_ids) and output.token_ids[-1] in stops
        if spec is not None and output.finish_reason == "stop" and not stopped:
            assert re.fullmatch(pattern, output.text), output
