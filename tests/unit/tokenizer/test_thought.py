"""Stops are looked for in the answer, not in the thought before it."""

from __future__ import annotations

import random

import pytest

from engine.constraints.grammar_payload import Thinking
from engine.protocol.messages import FinishedReq, StepOutputs
from engine.protocol.sampling_params import SamplingParams
from engine.protocol.tokenizer_messages import TextDelta
from engine.tokenizer import DetokenizerManager
from engine.tokenizer.thought import Thought
from tests.support.registering import register
from tests.unit.tokenizer.tokenizer_kinds import make_tokenizer

TOKENIZER = make_tokenizer("byte_level")
FREE = Thinking("<think>", "</think>", is_open=False)
OPEN = Thinking("<think>", "</think>", is_open=True)
CHANNELS = Thinking("<a>", "<e>", is_open=False, answer="<f>")
PROMPT = [1, 2, 3]


def token(name: str) -> int:
    (only,) = TOKENIZER.encode(name, add_special_tokens=False)
    return only


def output(
    text: str, thinking: Thinking | None, resumed: int = 0, together: int = 1, **fields: object
) -> tuple[str, TextDelta]:
    """What is shown of an output that says `text`, and the last delta. `resumed`: tokens that were
    emitted elsewhere; `together`: tokens a step."""
    manager = DetokenizerManager(TOKENIZER)
    params = SamplingParams(**{"skip_special_tokens": False, **fields}, thinking=thinking)  # type: ignore[arg-type]
    ids = TOKENIZER.encode(text, add_special_tokens=False)
    manager.add(register(1, params, PROMPT, ids[:resumed]))
    shown = ""
    for at in range(resumed, len(ids), together):
        run = ids[at : at + together]
        last = at + together >= len(ids)
        ends = [FinishedReq(1, "length", 3, 0, 0)] if last else []
        deltas, stopped = manager.process(
            StepOutputs(0, [1], run, ends, [], counts=[len(run)] if together > 1 else None)
        )
        shown += "".join(delta.text for delta in deltas)
        if stopped or last:
            break
    return shown, deltas[-1]


@pytest.mark.parametrize(
    ("text", "thinking", "thought"),
    [
        ("<think>a</think>b", FREE, "<think>a</think>"),
        (" \n<think>a</think>\n\nb", FREE, " \n<think>a</think>\n\n"),
        ("a</think> b </think>", OPEN, "a</think> "),
        ("<think>a", FREE, "<think>a"),
        ("b <think>c</think>", FREE, ""),
        (" b", FREE, ""),
        ("<thin", FREE, ""),
        ("</think>b", FREE, ""),
        ("<a>x<e><a>y<e><f>b <e>", CHANNELS, "<a>x<e><a>y<e><f>"),
        ("<c>b", CHANNELS, "<c>b"),
        ("<f>b", CHANNELS, "<f>"),
    ],
)
def test_where_the_thought_ends(text: str, thinking: Thinking, thought: str) -> None:
    for seed in range(20):
        rng, rest, split = random.Random(seed), text, Thought(thinking)
        thoughts = answer = ""
        while rest:
            size = rng.randint(1, 4)
            piece, rest = rest[:size], rest[size:]
            of_thought, of_answer = split.feed(piece)
            thoughts, answer = thoughts + of_thought, answer + of_answer
        assert (thoughts, answer + split.flush()) == (thought, text[len(thought) :])


@pytest.mark.parametrize("together", [1, 3])
@pytest.mark.parametrize("resumed", [0, 3])
@pytest.mark.parametrize(
    ("text", "thinking", "shown"),
    [
        ("<think>One. Two.</think>Three. Four", FREE, "<think>One. Two.</think>Three"),
        ("One. Two.</think>Three. Four", OPEN, "One. Two.</think>Three"),
        ("<think>One. Two. Three", FREE, None),
        ("One. Two.</think>", OPEN, None),
        ("One Three. Four", FREE, "One Three"),
        ("One. Two", None, "One"),
    ],
)
def test_stop_strings(
    text: str, thinking: Thinking | None, shown: str | None, resumed: int, together: int
) -> None:
    if thinking is None:
        resumed = 0
    got, last = output(text, thinking, resumed, together, stop=[".", "zz"])
    head = TOKENIZER.decode(
        TOKENIZER.encode(text, add_special_tokens=False)[:resumed], skip_special_tokens=False
    )
    assert head + got == (text if shown is None else shown)
    assert last.stop_reason == (None if shown is None else ".")
    assert last.finish_reason == ("length" if shown is None else "stop")


def test_white_space_behind_the_thought_is_no_answer() -> None:
    text = "<think>a\n\nb</think>\n\nYes.\n\nNo"
    assert output(text, FREE, stop=["\n\n"])[0] == "<think>a\n\nb</think>\n\nYes."
    newline = token("\n")
    ids = output("<think>a\nb</think>\nYes\nNo", FREE, stop_token_ids=[newline])
    assert (ids[0], ids[1].stop_reason) == ("<think>a\nb</think>\nYes", newline)


def test_a_stop_may_be_the_end_of_the_thought_itself() -> None:
    text = "<think>a.</think>Yes."
    assert output(text, FREE, stop=["</think>", "."])[0] == "<think>a."
    shown, last = output(text, FREE, stop_token_ids=[token("</think>"), token(".")])
    assert (shown, last.stop_reason) == ("<think>a.", token("</think>"))


@pytest.mark.parametrize("include", [False, True])
@pytest.mark.parametrize("together", [1, 4])
@pytest.mark.parametrize("mark", [".", "<|im_end|>", "</tool_call>"])
def test_stop_ids(mark: str, together: int, include: bool) -> None:
    for thinking, text, shown in (
        (FREE, f"<think>a{mark}</think>Yes{mark}No", f"<think>a{mark}</think>Yes"),
        (FREE, f"<think>a{mark}</think>{mark}No", f"<think>a{mark}</think>"),
        (OPEN, f"a{mark}</think>Yes{mark}No", f"a{mark}</think>Yes"),
        (FREE, f"Yes{mark}No", "Yes"),
        (FREE, f"{mark}No", ""),
    ):
        got, last = output(
            text,
            thinking,
            together=together,
            stop_token_ids=[token(mark)],
            include_stop_str_in_output=include,
        )
        assert got == shown + (mark if include else "")
        assert (last.finish_reason, last.stop_reason) == ("stop", token(mark))


def test_min_tokens_count_the_thought() -> None:
    text = "<think>a</think>.b.c"
    assert output(text, FREE, stop=["."], min_tokens=4)[0] == "<think>a</think>.b"
    assert output(text, FREE, stop=["."], min_tokens=3)[0] == "<think>a</think>"
    # What was held back came with the first token.
    assert output("\nb\nc", FREE, stop=["\n"], min_tokens=1)[0] == "\nb"


def test_marks_that_are_not_shown_end_the_thought() -> None:
    thinking = Thinking("<|im_start|>", "<|im_end|>", is_open=False)
    text = "<|im_start|>a.<|im_end|>Yes.No"
    fields = {"stop": ["."], "skip_special_tokens": True}
    assert output(text, thinking, **fields)[0] == "a.Yes"
    assert output(" .b", thinking, **fields)[0] == " "
    assert output(" <|eot_id|>.b", thinking, **fields)[0] == " "


def test_a_resume_behind_a_stop_id_is_refused() -> None:
    manager = DetokenizerManager(TOKENIZER)
    ids = TOKENIZER.encode("a</think>Yes.", add_special_tokens=False)
    params = SamplingParams(stop_token_ids=[token(".")], thinking=OPEN)
    with pytest.raises(ValueError, match="behind its stop"):
        manager.add(register(1, params, PROMPT, ids))
