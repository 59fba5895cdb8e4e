"""SGLang's API against a live server, called as SGLang's documentation does."""

from __future__ import annotations

import json
import threading
import time
from typing import Any

import httpx
import openai
import pytest

from engine.tokenizer.tokenizer import Tokenizer

MODEL = "manta-small"
GREEDY: dict[str, Any] = {"temperature": 0, "max_new_tokens": 16}
LONG: dict[str, Any] = {"temperature": 0, "max_new_tokens": 1500, "ignore_eos": True}
PROMPTS = ["def main():", "import os\n", "class Point:\n"]


@pytest.fixture(scope="module")
def base(url: str) -> str:
    return url.removesuffix("/v1")


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_pretrained(f"models/{MODEL}")


def generate(base: str, **body: Any) -> Any:
    reply = httpx.post(f"{base}/generate", json={"sampling_params": GREEDY, **body}, timeout=120)
    assert reply.status_code == 200, reply.text
    return reply.json()


def streamed(base: str, **body: Any) -> list[dict[str, Any]]:
    """As in SGLang's documentation: every line that begins with `data:`."""
    body = {"sampling_params": GREEDY, "stream": True, **body}
    events = []
    with httpx.stream("POST", f"{base}/generate", json=body, timeout=120) as reply:
        assert reply.status_code == 200
        for line in reply.iter_lines():
            if line.startswith("data:") and line != "data: [DONE]":
                events.append(json.loads(line[5:].strip("\n")))
    assert line == "" or line == "data: [DONE]"
    return events


def reason(item: dict[str, Any]) -> str:
    return str(item["meta_info"]["finish_reason"]["type"])


def test_greedy_output_is_that_of_completions(base: str, client: openai.OpenAI) -> None:
    got = generate(base, text=PROMPTS)
    wanted = client.completions.create(
        model=MODEL,
        prompt=PROMPTS,
        max_tokens=16,
        temperature=0,
        extra_body={"return_token_ids": True},
    )
    for item, choice in zip(got, wanted.choices, strict=True):
        assert item["text"] == choice.text
        assert item["output_ids"] == choice.token_ids  # type: ignore[attr-defined]
        assert reason(item) == choice.finish_reason


def test_token_ids_and_parameters_by_prompt(base: str, tokenizer: Tokenizer) -> None:
    ids = [tokenizer.encode(text) for text in PROMPTS]
    sampling = [{**GREEDY, "max_new_tokens": n} for n in (3, 9, 16)]
    got = generate(base, input_ids=ids, sampling_params=sampling)
    texts = generate(base, text=PROMPTS)
    for item, full, params in zip(got, texts, sampling, strict=True):
        assert len(item["output_ids"]) == params["max_new_tokens"]
        assert full["output_ids"][: params["max_new_tokens"]] == item["output_ids"]


@pytest.mark.parametrize(
    "fields",
    [
        {"text": PROMPTS[0]},
        {"text": PROMPTS, "return_logprob": True, "top_logprobs_num": 2},
        {"text": PROMPTS[0], "return_logprob": True, "logprob_start_len": 0},
        {"text": PROMPTS[0], "sampling_params": {"n": 2, "sampling_seed": 3, "max_new_tokens": 8}},
    ],
)
def test_a_stream_ends_with_the_reply(base: str, fields: dict[str, Any]) -> None:
    whole = generate(base, **fields)
    items = whole if isinstance(whole, list) else [whole]
    events = streamed(base, **fields)
    for index, item in enumerate(items):
        *_, last = [event for event in events if event.get("index", 0) == index]
        assert (last["text"], last["output_ids"]) == (item["text"], item["output_ids"])
        for key, value in item["meta_info"].items():
            if key.endswith("logprobs"):
                assert _numbers(last["meta_info"][key]) == pytest.approx(_numbers(value), abs=1e-4)


def _numbers(value: Any) -> list[float]:
    if isinstance(value, list):
        return [number for each in value for number in _numbers(each)]
    return [] if value is None else [value]


def test_logprobs_of_prompt_and_output(base: str, tokenizer: Tokenizer) -> None:
    got = generate(
        base,
        text=PROMPTS[0],
        return_logprob=True,
        logprob_start_len=0,
        top_logprobs_num=3,
        return_text_in_logprobs=True,
    )
    meta = got["meta_info"]
    assert [token for _, token, _ in meta["input_token_logprobs"]] == tokenizer.encode(PROMPTS[0])
    assert meta["input_token_logprobs"][0][0] is None
    assert [token for _, token, _ in meta["output_token_logprobs"]] == got["output_ids"]
    assert "".join(text for *_, text in meta["output_token_logprobs"]) == got["text"]
    for own, top in zip(meta["output_token_logprobs"], meta["output_top_logprobs"], strict=True):
        assert len(top) == 3 and top[0] == own  # greedy: the likeliest
    listed = generate(base, text=PROMPTS[0], return_logprob=True, token_ids_logprob=[7, 8])
    for others in listed["meta_info"]["output_token_ids_logprobs"]:
        assert [token for _, token, _ in others] == [7, 8]


def test_choices_are_scored_without_output(base: str) -> None:
    """How SGLang's frontend selects: the prompt's log-probabilities, and nothing generated."""
    sampling = {"max_new_tokens": 0, "temperature": 0}
    fields = {"return_logprob": True, "logprob_start_len": 0, "sampling_params": sampling}
    likely, unlikely = generate(base, text=["import os", "import zq"], **fields)
    assert likely["output_ids"] == [] and likely["meta_info"]["completion_tokens"] == 0
    total = [
        sum(p for p, *_ in item["meta_info"]["input_token_logprobs"][1:])
        for item in (likely, unlikely)
    ]
    assert total[0] > total[1]


def test_stop_strings_are_trimmed(base: str) -> None:
    free = generate(base, text=PROMPTS[0])["text"]
    word = free.split()[1]
    trimmed = generate(base, text=PROMPTS[0], sampling_params={**GREEDY, "stop": [word]})
    assert trimmed["meta_info"]["finish_reason"] == {"type": "stop", "matched": word}
    assert free.startswith(trimmed["text"]) and word not in trimmed["text"]
    sampling = {**GREEDY, "stop": [word], "no_stop_trim": True}
    kept = generate(base, text=PROMPTS[0], sampling_params=sampling)
    assert kept["text"] == trimmed["text"] + word


def test_a_stop_token_is_named_and_output(base: str) -> None:
    free = generate(base, text=PROMPTS[0])["output_ids"]
    sampling = {**GREEDY, "stop_token_ids": [free[4]]}
    got = generate(base, text=PROMPTS[0], sampling_params=sampling)
    at = free.index(free[4])
    assert got["meta_info"]["finish_reason"] == {"type": "stop", "matched": free[4]}
    assert got["output_ids"] == free[: at + 1]


def test_the_token_that_ends_an_output_is_named(base: str) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"]}
    sampling = {"json_schema": json.dumps(schema), "max_new_tokens": 200, "temperature": 0}
    got = generate(base, text="JSON: ", sampling_params=sampling)
    assert isinstance(json.loads(got["text"])["a"], bool)
    assert got["meta_info"]["finish_reason"] == {"type": "stop", "matched": got["output_ids"][-1]}


@pytest.mark.parametrize("constraint", [{"regex": "[0-9]{3}"}, {"ebnf": 'root ::= "yes" | "no"'}])
def test_structured_output(base: str, constraint: dict[str, str]) -> None:
    got = generate(base, text="Answer: ", sampling_params={**GREEDY, **constraint})
    if "regex" in constraint:
        assert len(got["text"]) == 3 and got["text"].isdigit()
    else:
        assert got["text"] in ("yes", "no")


def test_errors(base: str) -> None:
    bad = httpx.post(f"{base}/generate", json={"text": "a", "lora_id": "x"}, timeout=30)
    assert bad.status_code == 400 and "lora_id" in bad.json()["error"]["message"]
    sampling = {"json_schema": '{"type": 5}'}
    bad = httpx.post(
        f"{base}/generate", json={"text": "a", "sampling_params": sampling}, timeout=30
    )
    assert bad.status_code == 400 and "json_schema" in bad.json()["error"]["message"]


def test_what_is_served(base: str) -> None:
    for prefix in ("", "get_"):
        info = httpx.get(f"{base}/{prefix}model_info", timeout=30).json()
        assert info["served_model_name"] == MODEL and info["is_generation"]
        server = httpx.get(f"{base}/{prefix}server_info", timeout=30).json()
        assert (server["tp_size"], server["pp_size"], server["dtype"]) == (1, 1, "float32")
        assert server["max_total_num_tokens"] == 32768
        (state,) = server["internal_states"]
        assert state["num_running"] >= 0 and state["kv_total_tokens"] == 32768
    assert httpx.get(f"{base}/health_generate", timeout=30).status_code == 200


def test_a_flushed_cache_has_nothing(base: str) -> None:
    text = "def flushed():\n    return 1\n" * 8
    first = generate(base, text=text)
    assert generate(base, text=text)["meta_info"]["cached_tokens"] > 0
    # At once: the engine may still run a step that it had begun.
    reply = httpx.post(f"{base}/flush_cache", timeout=30)
    assert (reply.status_code, reply.text) == (200, "Cache flushed.\n")
    again = generate(base, text=text)
    assert again["meta_info"]["cached_tokens"] == 0
    assert again["output_ids"] == first["output_ids"]
    assert httpx.get(f"{base}/flush_cache", timeout=30).status_code == 200


class Call(threading.Thread):
    """A request that somebody else ends."""

    def __init__(self, url: str, body: dict[str, Any], headers: dict[str, str] | None = None):
        super().__init__()
        self._call: dict[str, Any] = {"url": url, "json": body, "headers": headers, "timeout": 120}
        self.reply: Any = None
        self.start()

    def run(self) -> None:
        self.reply = httpx.post(**self._call).json()


def wait_running(base: str, count: int) -> None:
    deadline = time.monotonic() + 30
    while True:
        (state,) = httpx.get(f"{base}/server_info", timeout=30).json()["internal_states"]
        if state["num_running"] == count:
            return
        assert time.monotonic() < deadline, state
        time.sleep(0.02)


def test_abort(base: str) -> None:
    wait_running(base, 0)
    mine = Call(f"{base}/generate", {"text": "a", "rid": "mine", "sampling_params": LONG})
    long = {"prompt": "b", "max_tokens": 1500, "temperature": 0, "ignore_eos": True}
    named = Call(f"{base}/v1/completions", {**long, "request_id": "named"})
    headed = Call(f"{base}/v1/completions", long, {"X-Request-Id": "headed"})
    wait_running(base, 3)
    busy = httpx.post(f"{base}/flush_cache", timeout=30)
    assert busy.status_code == 400 and "3 requests" in busy.json()["error"]["message"]
    for rid in ("min", "mine", "named", "headed"):
        reply = httpx.post(f"{base}/abort_request", json={"rid": rid}, timeout=30)
        assert reply.status_code == 200
    for call in (mine, named, headed):
        call.join(30)
    assert reason(mine.reply) == "abort"
    assert mine.reply["meta_info"]["completion_tokens"] == len(mine.reply["output_ids"]) < 1500
    assert named.reply["choices"][0]["finish_reason"] == "abort"
    assert headed.reply["choices"][0]["finish_reason"] == "abort"
    whole = generate(base, text="a", sampling_params={**LONG, "max_new_tokens": 50})
    count = min(50, len(mine.reply["output_ids"]))
    assert mine.reply["output_ids"][:count] == whole["output_ids"][:count]
    assert httpx.post(f"{base}/flush_cache", timeout=30).status_code == 200


def test_abort_all_ends_a_stream(base: str) -> None:
    wait_running(base, 0)
    timer = threading.Timer(
        0.3, lambda: httpx.post(f"{base}/abort_request", json={"abort_all": True}, timeout=30)
    )
    timer.start()
    events = streamed(base, text=["a", "b"], sampling_params=LONG)
    timer.join()
    for index in range(2):
        *before, last = [event for event in events if event["index"] == index]
        assert reason(last) == "abort" and len(before) > 0
    assert httpx.post(f"{base}/abort_request", json={"rid": ""}, timeout=30).status_code == 400
    wait_running(base, 0)
