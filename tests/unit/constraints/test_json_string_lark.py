"""Grammars of texts that stand in JSON strings."""

from __future__ import annotations

import json
import random
import re

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from deploy.http.parsers.tool_format import HERMES, TextInput
from engine.constraints import structured
from engine.constraints.json_string_lark import escaped_regex, in_json_string
from engine.errors import RequestError
from tests.support.grammars import EOS, allowed, small_tokenizer, start, text_of, walk

PATCH = r"""
start: begin_patch hunk+ end_patch
begin_patch: "*** Begin Patch" LF
end_patch: "*** End Patch" LF?
hunk: add_hunk | delete_hunk  // what can be done with a file
add_hunk: "*** Add File: " filename LF add_line+
delete_hunk: "*** Delete File: " filename LF
filename: /[^\n]{1,8}/
add_line: "+" /(.{0,6})/ LF -> line
%import common.LF
"""
SUM = r"""
start: expr
expr: term (SP ADD SP term)*
term: INT | "(" expr ")"
ADD: "+"
SP: " "
INT: /[0-9]{1,3}/
"""
QUOTES = r"""
start: item ("," item)* NEWLINE
item: "\"" | "\\" | /[\s"a]{1,3}/ | /\t\d[A-C\\]/i
%import common.NEWLINE
"""
PATTERNS = [
    r"a.c", r"[^a]", r"\s\S", r'["\\]+', r"[\x00-z]*", r"(?:ab|c\n)?", r"\n{2,3}", r"\w-\W",
    r"x\/y", r"[^\S\n]", r"\.\[", r"a+?b", "é.", r"\D\d",
]  # fmt: skip


def accepts(regex: str, text: str) -> bool:
    """Whether llguidance's regular expression matches the whole text."""
    constraint = start(structured.grammar(f"start: /{regex}/"))
    for token in small_tokenizer().encode(text, add_special_tokens=False):
        if constraint.is_terminated or not constraint.accept(token):
            return False
    return constraint.is_terminated or any(token in allowed(constraint) for token in EOS)


@settings(max_examples=40, deadline=None)
@given(st.sampled_from(PATTERNS), st.text(alphabet='abc x-y/."\\\n\t\x01é9[', max_size=4))
@example(r"a.c", 'a"c')
@example(r'["\\]+', '"\\')
@example(r"[\x00-z]*", 'a\n\x01"')
def test_a_regex_matches_the_string_of_what_it_matched(pattern: str, text: str) -> None:
    written = json.dumps(text, ensure_ascii=False)[1:-1]
    if not written:
        return
    # Python's \w and \d know more alphabets than ASCII in both.
    assert accepts(escaped_regex(pattern), written) == bool(re.fullmatch(pattern, text))


@pytest.mark.parametrize("lark", [PATCH, SUM, QUOTES])
@pytest.mark.parametrize("seed", range(4))
def test_the_text_of_a_call_follows_its_grammar(lark: str, seed: int) -> None:
    spec = HERMES.constraint(
        {"edit": TextInput("input", lark), "other": {"type": "object"}},
        may_answer=False,
        parallel=False,
    )
    rng = random.Random(seed)
    while True:
        text = text_of(walk(start(spec), rng))
        call = json.loads(text.removeprefix("<tool_call>\n").removesuffix("\n</tool_call>"))
        if call["name"] == "edit":
            break
    # The grammar itself is the judge.
    constraint = start(structured.grammar(lark))
    for token in small_tokenizer().encode(call["arguments"]["input"], add_special_tokens=False):
        assert constraint.accept(token), call
    assert constraint.is_terminated or any(token in allowed(constraint) for token in EOS), call


@pytest.mark.parametrize(
    ("lark", "words"),
    [
        ('start: %json {"type": "object"}', "%json"),
        ("start: /a(?=b)/", "assert"),
        ("start: /(/", "broken"),
        ('start: "\\x"', "isn't JSON"),
    ],
)
def test_what_cannot_be_written_so_is_refused(lark: str, words: str) -> None:
    with pytest.raises(RequestError, match=re.escape(words)):
        in_json_string(lark)
