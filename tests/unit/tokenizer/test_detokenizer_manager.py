"""DetokenizerManager: deltas, stop strings, logprobs, resume, ends."""

from __future__ import annotations

import random
from collections.abc import Sequence

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.protocol.messages import FinishedReq, StepOutputs
from engine.protocol.sampling_params import SamplingParams
from engine.protocol.step import TokenLogprobs
from engine.protocol.tokenizer_messages import TextDelta
from engine.tokenizer import DetokenizerManager, Tokenizer
from tests.support.registering import register
from tests.support.tiny_tokenizers import CORPUS, EOS, write_byte_level, write_sentencepiece
from tests.unit.tokenizer.tokenizer_kinds import make_tokenizer

PROMPT = [0, 5, 6]
relaxed = settings(max_examples=60)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer.from_pretrained(write_byte_level(tmp_path_factory.mktemp("bytes")))


@pytest.fixture
def manager(tokenizer: Tokenizer) -> DetokenizerManager:
    return DetokenizerManager(tokenizer)


def step(
    tokens: dict[int, int],
    finished: Sequence[FinishedReq] = (),
    started: Sequence[tuple[int, int, float]] = (),
    logprobs: dict[int, TokenLogprobs] | None = None,
    prompt_logprobs: dict[int, list[TokenLogprobs | None]] | None = None,
) -> StepOutputs:
    return StepOutputs(
        0,
        list(tokens),
        list(tokens.values()),
        list(finished),
        list(started),
        logprobs,
        prompt_logprobs,
    )


def end(rid: int, reason: str, matched: int | None = None) -> FinishedReq:
    return FinishedReq(rid, reason, len(PROMPT), 0, 0, matched)


def run(
    manager: DetokenizerManager, rid: int, ids: list[int], last: FinishedReq
) -> list[TextDelta]:
    """Feed `ids` a step at a time, `last` with the last of them; stops where it is stopped."""
    deltas = []
    for i, token_id in enumerate(ids):
        is_last = i == len(ids) - 1
        new, stopped = manager.process(step({rid: token_id}, [last] if is_last else []))
        deltas += new
        if stopped:
            break
    return deltas


def encode(tokenizer: Tokenizer, text: str) -> list[int]:
    return tokenizer.encode(text, add_special_tokens=False)


def text_of(deltas: list[TextDelta]) -> str:
    return "".join(delta.text for delta in deltas)


def ids_of(deltas: list[TextDelta]) -> list[int]:
    return [token_id for delta in deltas for token_id in delta.token_ids]


def test_text_runs_until_the_length_limit(
    manager: DetokenizerManager, tokenizer: Tokenizer
) -> None:
    ids = encode(tokenizer, "The fox 🦊 jumps")
    manager.add(register(7, SamplingParams(), PROMPT))
    started, _ = manager.process(step({7: ids[0]}, started=[(7, 2, 0.5)]))
    deltas = started + run(manager, 7, ids[1:], end(7, "length"))
    assert text_of(deltas) == "The fox 🦊 jumps"
    assert ids_of(deltas) == ids
    assert all(delta.finish_reason is None for delta in deltas[:-1])
    assert (deltas[-1].finish_reason, deltas[-1].stop_reason) == ("length", None)
    assert (deltas[-1].num_output, deltas[-1].num_prompt, deltas[-1].num_cached) == (
        len(ids),
        3,
        2,
    )
    # The fox has four bytes, so some steps had nothing to send: their ids came later.
    assert len(deltas) < len(ids)
    assert len(manager) == 0


def test_return_token_ids_makes_a_delta_of_each_token(
    manager: DetokenizerManager, tokenizer: Tokenizer
) -> None:
    ids = encode(tokenizer, "🦊🦊")
    manager.add(register(1, SamplingParams(), PROMPT, return_token_ids=True))
    deltas = run(manager, 1, ids, end(1, "length"))
    assert [delta.token_ids for delta in deltas] == [[token_id] for token_id in ids]


@pytest.mark.parametrize("include", [False, True])
@pytest.mark.parametrize("skip", [False, True])
def test_stop_token_is_output_but_no_text(
    manager: DetokenizerManager, tokenizer: Tokenizer, include: bool, skip: bool
) -> None:
    ids = [*encode(tokenizer, "The fox"), tokenizer.eos_token_id or 0]
    params = SamplingParams(include_stop_str_in_output=include, skip_special_tokens=skip)
    manager.add(register(1, params, PROMPT))
    deltas = run(manager, 1, ids, end(1, "stop", ids[-1]))
    assert text_of(deltas) == "The fox" + (EOS if include and not skip else "")
    assert ids_of(deltas) == ids
    assert (deltas[-1].finish_reason, deltas[-1].stop_reason) == ("stop", ids[-1])
    assert deltas[-1].num_output == len(ids)


def test_stop_string_ends_the_request_here(
    manager: DetokenizerManager, tokenizer: Tokenizer
) -> None:
    ids = encode(tokenizer, "Yes.\n### User: more")
    manager.add(register(1, SamplingParams(stop=["never", "\n### User:"]), PROMPT))
    deltas = []
    count, stopped = 0, []
    while not stopped:
        new, stopped = manager.process(step({1: ids[count]}))
        deltas += new
        count += 1
    assert stopped == [1]
    assert text_of(deltas) == "Yes."
    assert (deltas[-1].finish_reason, deltas[-1].stop_reason) == ("stop", "\n### User:")
    assert deltas[-1].num_output == count < len(ids)
    assert ids_of(deltas) == ids[:count]
    # What the scheduler had in flight is ignored.
    assert manager.process(step({1: ids[count]}, [end(1, "length")])) == ([], [])
    assert len(manager) == 0


def test_stop_string_in_the_last_token_goes_before_length(
    manager: DetokenizerManager, tokenizer: Tokenizer
) -> None:
    ids = encode(tokenizer, "one STOP")
    manager.add(register(1, SamplingParams(stop=["STOP"], include_stop_str_in_output=True), PROMPT))
    deltas = run(manager, 1, ids, end(1, "length"))
    assert text_of(deltas) == "one STOP"
    assert (deltas[-1].finish_reason, deltas[-1].stop_reason) == ("stop", "STOP")


@pytest.mark.parametrize("reason", ["length", "abort", "error"])
def test_held_text_is_flushed_at_other_ends(
    manager: DetokenizerManager, tokenizer: Tokenizer, reason: str
) -> None:
    ids = [*encode(tokenizer, "one STO"), *encode(tokenizer, "🦊")[:-1]]
    manager.add(register(1, SamplingParams(stop=["STOP", "STO\ufffd!"]), PROMPT))
    deltas = [d for i in ids for d in manager.process(step({1: i}))[0]]
    assert text_of(deltas) == "one "
    finished = end(1, reason)
    finished.message, finished.status, finished.param = "why", 503, "prompt"
    (last,), stopped = manager.process(step({}, [finished]))
    assert (last.text, last.finish_reason, stopped) == ("STO\ufffd", reason, [])
    assert (last.error, last.error_status, last.error_param) == ("why", 503, "prompt")
    assert ids_of([*deltas, last]) == ids


def test_min_tokens_lets_early_stop_strings_pass(
    manager: DetokenizerManager, tokenizer: Tokenizer
) -> None:
    ids = encode(tokenizer, "STOP and STOP")
    (at,) = (i for i in range(1, 9) if tokenizer.decode(ids[:i]) == "STOP")
    manager.add(register(1, SamplingParams(stop=["STOP"], min_tokens=at), PROMPT))
    deltas = run(manager, 1, ids, end(1, "length"))
    assert text_of(deltas) == "STOP and "
    assert deltas[-1].stop_reason == "STOP"


def test_abort_and_unknown_requests(manager: DetokenizerManager) -> None:
    manager.add(register(1, SamplingParams(), PROMPT))
    manager.abort(1)
    manager.abort(2)
    assert manager.process(step({1: 9, 2: 9}, [end(2, "abort")], [(2, 0, 0.0)])) == ([], [])
    assert len(manager) == 0


def test_logprobs_travel_with_their_tokens(
    manager: DetokenizerManager, tokenizer: Tokenizer
) -> None:
    text = "ab 🦊!"
    ids = encode(tokenizer, text)
    manager.add(register(1, SamplingParams(logprobs=1), PROMPT))
    deltas = []
    for i, token_id in enumerate(ids):
        item = TokenLogprobs(-0.5 - i, [token_id, 4], [-0.5 - i, -9.0])
        # Index 1: request 1 is the second row of the step.
        out = step({99: 3, 1: token_id}, logprobs={1: item})
        deltas += manager.process(out)[0]
    entries = [entry for delta in deltas for entry in delta.logprobs or []]
    assert [entry.token_id for entry in entries] == ids
    assert [entry.logprob for entry in entries] == [-0.5 - i for i in range(len(ids))]
    assert bytes(byte for entry in entries for byte in entry.bytes).decode() == text
    assert all(len(d.logprobs or []) == len(d.token_ids) for d in deltas)
    for entry, token_id in zip(entries, ids, strict=True):
        assert entry.top[0] == (entry.token, token_id, entry.logprob, entry.bytes)
        assert entry.top[1][:2] == (tokenizer.token_text(4), 4)
    fox = text.index("🦊")
    offsets = [entry.text_offset for entry in entries]
    assert offsets == sorted(offsets) and offsets.count(fox) >= 2 and offsets[-1] == fox + 1


@relaxed
@given(st.data())
def test_offsets_are_places_in_the_text(tokenizer: Tokenizer, data: st.DataObject) -> None:
    """With a stop string that is cut off, in the text as it was before the cut."""
    text = data.draw(st.text("ab 🦊é", min_size=1, max_size=12))
    begin = data.draw(st.integers(0, len(text) - 1))
    stop = text[begin : begin + data.draw(st.integers(1, 4))]
    params = SamplingParams(
        logprobs=0,
        stop=data.draw(st.sampled_from([[], [stop]])),
        include_stop_str_in_output=data.draw(st.booleans()),
        skip_special_tokens=data.draw(st.booleans()),
    )
    ids = [*encode(tokenizer, text), 1]
    manager = DetokenizerManager(tokenizer)
    send_every_token = data.draw(st.booleans())
    manager.add(register(1, params, PROMPT, return_token_ids=send_every_token))
    deltas = []
    for i, token_id in enumerate(ids):
        last = [end(1, "stop", token_id)] if i + 1 == len(ids) else []
        item = TokenLogprobs(-1.0, [], [])
        deltas += manager.process(step({1: token_id}, last, logprobs={0: item}))[0]
    entries = [entry for delta in deltas for entry in delta.logprobs or ()]
    offsets = [entry.text_offset for entry in entries]
    assert offsets == sorted(offsets)
    given = text_of(deltas)
    assert text.startswith(given.removesuffix("<|end|>"))
    for entry, offset in zip(entries, offsets, strict=True):
        if "\ufffd" not in entry.token and not entry.token.startswith("<|"):
            assert text[offset:].startswith(entry.token)
    if not params.stop:
        assert offsets[-1] <= len(given)


def test_prompt_logprobs_come_with_the_first_delta(
    manager: DetokenizerManager, tokenizer: Tokenizer
) -> None:
    prompt = tokenizer.encode("The fox")
    items = [None, *(TokenLogprobs(-float(i), [], []) for i in range(1, len(prompt)))]
    manager.add(register(1, SamplingParams(prompt_logprobs=0), np.array(prompt, np.int32)))
    fox = encode(tokenizer, "🦊")
    first, _ = manager.process(step({1: fox[0]}, started=[(1, 0, 0.0)], prompt_logprobs={1: items}))
    assert first == []
    deltas = run(manager, 1, fox[1:], end(1, "length"))
    entries = deltas[0].prompt_logprobs
    assert entries is not None and entries[0] is None
    assert [entry.token_id for entry in entries if entry] == prompt[1:]
    begin = len(tokenizer.decode(prompt[:1], False))  # an echo has the names of special tokens
    assert next(entry.text_offset for entry in entries if entry) == begin
    assert [tokenizer.token_text(i) for i in prompt[1:]] == [e.token for e in entries if e]
    assert all(delta.prompt_logprobs is None for delta in deltas[1:])


@relaxed
@given(
    st.text("STOP 🦊é\n") | st.sampled_from(CORPUS),
    st.lists(st.sampled_from(["STOP", "OP ", "🦊é", "jumps over", "\n\n"]), max_size=2),
    st.integers(0, 100),
    st.integers(0, 12),
)
def test_resume_goes_on_where_it_was(
    tokenizer: Tokenizer, text: str, stop: list[str], cut: int, min_tokens: int
) -> None:
    params = SamplingParams(stop=stop, min_tokens=min_tokens)
    ids = encode(tokenizer, text)
    whole = DetokenizerManager(tokenizer)
    whole.add(register(1, params, PROMPT))
    expected = run(whole, 1, ids, end(1, "length"))

    first = DetokenizerManager(tokenizer)
    first.add(register(1, params, PROMPT, return_token_ids=True))
    before = run(first, 1, ids[: cut % (len(ids) + 1)], end(9, "length"))
    if before and before[-1].finish_reason:
        assert text_of(before) == text_of(expected)
        return
    resumed = DetokenizerManager(tokenizer)
    resumed.add(register(1, params, PROMPT, ids_of(before)))
    after = run(resumed, 1, ids[len(ids_of(before)) :], end(1, "length"))
    if after:
        assert text_of(before) + text_of(after) == text_of(expected)
        assert ids_of(before) + ids_of(after) == ids_of(expected)
        fields = ("finish_reason", "stop_reason", "num_output")
        for name in fields:
            assert getattr(after[-1], name) == getattr(expected[-1], name)


def test_resume_behind_a_stop_string_is_refused(
    manager: DetokenizerManager, tokenizer: Tokenizer
) -> None:
    with pytest.raises(ValueError, match="stop string"):
        manager.add(
            register(1, SamplingParams(stop=["fox"]), PROMPT, encode(tokenizer, "The fox jumps"))
        )
    assert len(manager) == 0


@pytest.mark.parametrize("write", [write_byte_level, write_sentencepiece])
def test_many_requests_at_once(write: object, tmp_path_factory: pytest.TempPathFactory) -> None:
    assert callable(write)
    tokenizer = Tokenizer.from_pretrained(write(tmp_path_factory.mktemp("many")))
    manager = DetokenizerManager(tokenizer)
    rng = random.Random(0)
    texts = {rid: rng.choice(CORPUS)[rng.randrange(40) :] for rid in range(50)}
    prompts = {rid: tokenizer.encode(text[:3]) for rid, text in texts.items()}
    outputs = {rid: tokenizer.encode(text, False) for rid, text in texts.items()}
    for rid in texts:
        manager.add(register(rid, SamplingParams(), prompts[rid]))
    got = dict.fromkeys(texts, "")
    left = {rid: iter(ids) for rid, ids in outputs.items()}
    while left:
        chosen = rng.sample(sorted(left), min(len(left), 20))
        tokens = {rid: next(left[rid], None) for rid in chosen}
        ended = [rid for rid, token_id in tokens.items() if token_id is None]
        for rid in ended:
            del left[rid]
        new, _ = manager.process(
            step(
                {rid: token_id for rid, token_id in tokens.items() if token_id is not None},
                [end(rid, "length") for rid in ended],
            )
        )
        for delta in new:
            got[delta.rid] += delta.text
    for rid, text in texts.items():
        whole = tokenizer.decode(prompts[rid] + outputs[rid])
        assert got[rid] == whole[len(tokenizer.decode(prompts[rid])) :]
        assert got[rid].strip() == text.strip()
    assert len(manager) == 0


def test_deltas_travel_as_messages(manager: DetokenizerManager, tokenizer: Tokenizer) -> None:
    manager.add(register(1, SamplingParams(stop=["fox"], logprobs=0), PROMPT))
    item = TokenLogprobs(-1.0, [4], [-2.0])
    deltas = [
        delta
        for token_id in encode(tokenizer, "The fox")
        for delta in manager.process(step({1: token_id}, logprobs={0: item}))[0]
    ]
    data = msgspec.msgpack.encode(deltas)
    assert msgspec.msgpack.decode(data, type=list[TextDelta]) == deltas


def test_spaces_between_special_tokens() -> None:
    words = make_tokenizer("word_level")
    ids = encode(words, "fox <s> </s>")
    for spaces, expected in ((True, "fox <s> </s>"), (False, "fox <s></s>")):
        manager = DetokenizerManager(words)
        params = SamplingParams(skip_special_tokens=False, spaces_between_special_tokens=spaces)
        manager.add(register(1, params, PROMPT[:0]))
        assert text_of(run(manager, 1, ids, end(1, "length"))) == expected


def test_an_embedding_comes_with_the_end(manager: DetokenizerManager) -> None:
    for rid in (1, 2, 3):
        manager.add(register(rid, SamplingParams(), PROMPT))
    out = step({3: 7}, [end(1, "stop"), end(2, "stop"), end(9, "stop")], [(1, 2, 0.0), (2, 0, 0.0)])
    out.embeddings = {1: b"abcd", 2: b"efgh", 9: b"ijkl"}
    deltas, stopped = manager.process(out)
    found = {delta.rid: delta for delta in deltas}
    assert [found[rid].embedding for rid in (1, 2)] == [b"abcd", b"efgh"]
    assert found[1].num_cached == 2 and found[1].token_ids == [] and found[1].text == ""
    assert 3 not in found or found[3].embedding is None
    assert stopped == [] and len(manager) == 1


def in_runs(
    manager: DetokenizerManager, ids: list[int], cuts: Sequence[int], last: FinishedReq
) -> tuple[list[TextDelta], list[int]]:
    """Feed `ids` in runs of the lengths `cuts`, as steps that checked drafts give them. Deltas, and
    the requests that stop strings ended."""
    deltas: list[TextDelta] = []
    stopped: list[int] = []
    at = 0
    for cut in cuts:
        part = ids[at : at + cut]
        if not part or stopped:
            break
        logprobs = {i: TokenLogprobs(-float(at + i), [], []) for i in range(len(part))}
        at += len(part)
        ends = [last] if at == len(ids) else []
        out = StepOutputs(0, [1], part, ends, [], logprobs, counts=[len(part)])
        new, found = manager.process(out)
        deltas += new
        stopped += found
    return deltas, stopped


@given(data=st.data())
@relaxed
def test_runs_give_what_single_tokens_give(tokenizer: Tokenizer, data: st.DataObject) -> None:
    """Text, ids, log-probabilities and ends, with stop strings in the middle of a run."""
    text = data.draw(st.sampled_from(CORPUS))
    ids = encode(tokenizer, text)[:40]
    begin = data.draw(st.integers(0, max(0, len(text) - 3)))
    stop = data.draw(st.sampled_from([[], [text[begin : begin + 3] or "x"], ["e", "th"]]))
    params = SamplingParams(
        stop=stop,
        min_tokens=data.draw(st.sampled_from([0, 5])),
        include_stop_str_in_output=data.draw(st.booleans()),
        logprobs=0,
    )
    last = end(1, "stop", ids[-1]) if data.draw(st.booleans()) else end(1, "length")
    cuts = data.draw(st.lists(st.integers(1, 9), min_size=len(ids), max_size=len(ids)))
    found = []
    for lengths in ([1] * len(ids), cuts):
        manager = DetokenizerManager(tokenizer)
        manager.add(register(1, params, PROMPT))
        deltas, stopped = in_runs(manager, ids, lengths, last)
        entries = [(e.token_id, e.text_offset) for d in deltas for e in d.logprobs or ()]
        tail = deltas[-1]
        found.append(
            (
                text_of(deltas),
                ids_of(deltas),
                entries,
                (tail.finish_reason, tail.stop_reason, tail.num_output),
                bool(stopped) or tail.finish_reason is not None,
                len(manager),
            )
        )
    assert found[0] == found[1]
