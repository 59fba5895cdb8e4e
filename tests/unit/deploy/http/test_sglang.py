"""SGLang's API: `/generate` in and out, and the routes beside it, over scripted outputs."""

from __future__ import annotations

import asyncio
import itertools
import json
from typing import Any

import httpx
import pytest

from deploy.http.api import build_api
from deploy.http.served_models import ServedModels
from deploy.http.settings import ApiSettings
from deploy.http.sglang import replies
from deploy.options import ServerOptions
from engine.constraints import ConstraintSpec
from engine.errors import RequestError
from engine.protocol.sampling_params import SamplingParams
from tests.support.api_calls import call, complete, events, post
from tests.support.fake_client import BOS, FakeEngineClient, expected_ids, expected_text

PATH = "/generate"
SHORT = {"max_new_tokens": 4, "sampling_seed": 5}


def whole(client: FakeEngineClient | None = None, **fields: Any) -> Any:
    reply = post(PATH, client, **{"text": "abc", "sampling_params": SHORT} | fields)
    assert reply.status_code == 200, reply.text
    replies.GenerateReply.model_validate(reply.json())
    return reply.json()


def streamed(client: FakeEngineClient | None = None, **fields: Any) -> list[dict[str, Any]]:
    body = {"text": "abc", "sampling_params": SHORT, "stream": True} | fields
    # Nothing waits for a store, so that each event comes by itself.
    settings = ApiSettings(ServerOptions(request_store="none"))
    client = client or FakeEngineClient()
    found = events(call(client, "POST", PATH, api_settings=settings, json=body))
    for event in found:
        replies.GeneratedChunk.model_validate(event)
    return found


def without_times(item: dict[str, Any]) -> dict[str, Any]:
    meta = {k: v for k, v in item["meta_info"].items() if k not in ("id", "e2e_latency")}
    return {**{k: v for k, v in item.items() if k != "index"}, "meta_info": meta}


def refused(client: FakeEngineClient | None = None, **fields: Any) -> str:
    """The message of a request that is refused, in SGLang's shape."""
    reply = post(PATH, client, **fields)
    assert reply.status_code == 400, reply.text
    assert list(reply.json()) == ["error"] and list(reply.json()["error"]) == ["message"]
    return str(reply.json()["error"]["message"])


def test_a_reply() -> None:
    client = FakeEngineClient()
    client.num_cached = 3
    got = whole(client, rid="mine")
    assert got["meta_info"].pop("e2e_latency") > 0
    assert got == {
        "text": expected_text(5, 4),
        "output_ids": expected_ids(5, 4),
        "meta_info": {
            "id": "mine",
            "finish_reason": {"type": "length", "length": 4},
            "prompt_tokens": 4,
            "weight_version": "default",
            "completion_tokens": 4,
            "cached_tokens": 3,
        },
    }


def test_the_same_tokens_as_a_completion() -> None:
    ours, theirs = FakeEngineClient(), FakeEngineClient()
    names = {"max_new_tokens": "max_tokens", "sampling_seed": "seed", "no_stop_trim": ""}
    sampling: dict[str, Any] = {
        **SHORT,
        "temperature": 0,
        "top_p": 0.5,
        "top_k": 3,
        "min_p": 0.1,
        "frequency_penalty": 1,
        "presence_penalty": -1,
        "repetition_penalty": 1.5,
        "min_new_tokens": 2,
        "stop": ["zz"],
        "stop_token_ids": [7],
        "ignore_eos": True,
        "skip_special_tokens": False,
        "spaces_between_special_tokens": False,
        "no_stop_trim": True,
        "logit_bias": {"5": 2},
    }
    whole(ours, sampling_params=sampling)
    fields = {names.get(name, name): value for name, value in sampling.items()}
    fields |= {"min_tokens": fields.pop("min_new_tokens"), "include_stop_str_in_output": True}
    del fields[""]
    complete(theirs, prompt="abc", **fields)
    assert ours.started[0].params == theirs.started[0].params
    assert ours.started[0].prompt_ids == theirs.started[0].prompt_ids


def test_defaults() -> None:
    client = FakeEngineClient()
    assert len(whole(client, sampling_params={})["output_ids"]) == 128
    params = client.started[0].params
    assert params == SamplingParams(max_tokens=128, seed=params.seed)
    # Where the context leaves less than the default, that is the limit.
    assert len(whole(client, text="a" * 200, sampling_params={})["output_ids"]) == 256 - 201


def test_token_ids_are_prompts() -> None:
    client = FakeEngineClient()
    one = whole(client, text=None, input_ids=[5, 6])
    several = whole(client, text=None, input_ids=[[5], [6, 7]])
    assert one["meta_info"]["prompt_tokens"] == 2
    assert [item["meta_info"]["prompt_tokens"] for item in several] == [1, 2]
    assert [request.prompt_ids for request in client.started] == [[5, 6], [5], [6, 7]]


def test_a_batch_has_parameters_by_prompt() -> None:
    client = FakeEngineClient()
    sampling = [
        {"max_new_tokens": 2, "sampling_seed": 1, "temperature": 0},
        {"max_new_tokens": 5, "sampling_seed": 2, "regex": "[a-z]+"},
        {"max_new_tokens": 3, "sampling_seed": 3, "stop": "zzz"},
    ]
    got = whole(client, text=["a", "bb", "ccc"], sampling_params=sampling, rid="r")
    assert [item["output_ids"] for item in got] == [
        expected_ids(1, 2),
        expected_ids(2, 5),
        expected_ids(3, 3),
    ]
    assert [item["meta_info"]["id"] for item in got] == ["r_0", "r_1", "r_2"]
    first, second, third = (request.params for request in client.started)
    assert (first.temperature, second.temperature) == (0, 1)
    assert (first.stop, third.stop) == ([], ["zzz"])
    assert first.constraint is None and second.constraint is not None
    assert len(client.checked) == 1


def test_one_set_of_parameters_is_for_the_whole_batch() -> None:
    client = FakeEngineClient()
    got = whole(client, text=["a", "b"], sampling_params={**SHORT, "regex": "[a-z]+"})
    assert [item["text"] for item in got] == [expected_text(5, 4)] * 2
    assert len(client.checked) == 1


def test_a_list_of_one_is_a_list() -> None:
    assert [item["text"] for item in whole(text=["a"])] == [expected_text(5, 4)]


def test_copies() -> None:
    got = whole(text="a", sampling_params={**SHORT, "n": 2}, rid="r")
    assert [item["text"] for item in got] == [expected_text(5, 4), expected_text(6, 4)]
    assert [item["meta_info"]["id"] for item in got] == ["r", "r"]
    batch = whole(text=["a", "b"], sampling_params={**SHORT, "n": 2}, rid=["x", "y"])
    assert [item["meta_info"]["id"] for item in batch] == ["x", "x", "y", "y"]


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"text": ["a", "bb"], "sampling_params": [SHORT, {"max_new_tokens": 6}]},
        {"sampling_params": {**SHORT, "n": 2}},
        {"return_logprob": True, "top_logprobs_num": 2, "logprob_start_len": 0},
        {"sampling_params": {**SHORT, "stop": expected_text(5, 4)[1:3]}},
        {"sampling_params": {**SHORT, "max_new_tokens": 40, "stream_interval": 8}},
        {"sampling_params": {**SHORT, "max_new_tokens": 0}},
    ],
)
def test_the_last_event_of_a_stream_is_the_reply(fields: dict[str, Any]) -> None:
    fixed = [{"sampling_seed": 5, **each} for each in _listed(fields.get("sampling_params", SHORT))]
    fields = {**fields, "sampling_params": fixed if len(fixed) > 1 else fixed[0]}
    given = whole(**fields)
    items = given if isinstance(given, list) else [given]
    found = streamed(**fields)
    assert all(("index" in event) == isinstance(given, list) for event in found)
    for index, item in enumerate(items):
        mine = [event for event in found if event.get("index", 0) == index]
        assert without_times(mine[-1]) == without_times(item)
        assert mine[-1]["meta_info"]["e2e_latency"] > 0
        for before, after in itertools.pairwise(mine):
            assert before["meta_info"]["finish_reason"] is None
            assert after["text"].startswith(before["text"])
            ids = before["output_ids"]
            assert len(ids) == before["meta_info"]["completion_tokens"]
            assert after["output_ids"][: len(ids)] == ids and len(after["output_ids"]) > len(ids)


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def test_a_stream_interval() -> None:
    found = streamed(sampling_params={"max_new_tokens": 20, "stream_interval": 8})
    assert [len(event["output_ids"]) for event in found] == [1, 9, 17, 20]


def test_why_it_stopped() -> None:
    text = expected_text(5, 4)
    got = whole(sampling_params={**SHORT, "stop": ["#", text[2]]})
    assert got["meta_info"]["finish_reason"] == {"type": "stop", "matched": text[2]}
    assert got["text"] == text[:2] and got["output_ids"] == expected_ids(5, 3)
    client = FakeEngineClient()
    client.script = "Hi"
    got = whole(client)  # neither stop string nor token: a grammar was complete
    assert got["meta_info"]["finish_reason"] == {"type": "stop", "matched": ord("i")}


def test_logprobs() -> None:
    meta = whole(return_logprob=True)["meta_info"]
    ids = expected_ids(5, 4)
    assert meta["input_token_logprobs"] == []
    assert meta["output_token_logprobs"] == [[-0.5, token, None] for token in ids]
    assert "output_top_logprobs" not in meta
    fields: dict[str, Any] = {"return_logprob": True, "top_logprobs_num": 2}
    fields["return_text_in_logprobs"] = True
    meta = whole(logprob_start_len=0, **fields)["meta_info"]
    assert meta["input_token_logprobs"] == [
        [None, BOS, "<s>"],
        *([-0.5, ord(char), char] for char in "abc"),
    ]
    first, *others = meta["input_top_logprobs"]
    assert first is None and others[0] == [[-0.5, ord("a"), "a"], [-1.5, ord("Y"), "Y"]]
    assert [top[0][1] for top in meta["output_top_logprobs"]] == ids
    meta = whole(logprob_start_len=2, **fields)["meta_info"]
    assert [entry[1] for entry in meta["input_token_logprobs"]] == [ord("b"), ord("c")]
    assert "input_token_logprobs" not in whole()["meta_info"]


def test_logprobs_of_listed_tokens() -> None:
    client = FakeEngineClient()
    meta = whole(client, return_logprob=True, token_ids_logprob=[7, 8])["meta_info"]
    assert client.started[0].params.logprob_token_ids == [7, 8]
    assert {"input_token_ids_logprobs", "output_token_ids_logprobs"} <= meta.keys()


def test_logprobs_of_the_likeliest_and_of_listed_tokens() -> None:
    client = FakeEngineClient()
    fields = {"return_logprob": True, "token_ids_logprob": [7], "top_logprobs_num": 2}
    meta = whole(client, **fields, stream_options={"include_usage": True})["meta_info"]
    params = client.started[0].params
    assert (params.logprob_token_ids, params.logprobs) == ([7], 2)
    for listed, top in zip(
        meta["output_token_ids_logprobs"], meta["output_top_logprobs"], strict=True
    ):
        assert (len(listed), len(top)) == (1, 2) and listed[0][1] == 7


def test_logprobs_by_prompt() -> None:
    client = FakeEngineClient()
    got = whole(
        client,
        text=["a", "b", "c"],
        return_logprob=[True, False, True],
        logprob_start_len=[0, 0, -1],
        top_logprobs_num=[1, 0, 0],
        token_ids_logprob=[[], [], [9]],
    )
    first, second, third = (item["meta_info"] for item in got)
    assert len(first["input_token_logprobs"]) == 2 and "output_top_logprobs" in first
    assert "output_token_logprobs" not in second
    assert third["input_token_logprobs"] == [] and "output_token_ids_logprobs" in third
    params = [request.params for request in client.started]
    assert [p.logprobs for p in params] == [1, None, 0]
    assert [p.prompt_logprobs for p in params] == [1, None, None]


def test_a_prompt_can_be_scored_without_output() -> None:
    sampling: list[Any] = [{**SHORT, "max_new_tokens": 0}, SHORT]
    fields: dict[str, Any] = {"return_logprob": True, "logprob_start_len": 0}
    scored, continued = whole(text=["ab", "cd"], sampling_params=sampling, **fields)
    assert (scored["text"], scored["output_ids"]) == ("", [])
    assert scored["meta_info"]["finish_reason"] == {"type": "length", "length": 0}
    assert len(scored["meta_info"]["input_token_logprobs"]) == 3
    assert scored["meta_info"]["output_token_logprobs"] == []
    assert len(continued["output_ids"]) == 4


@pytest.mark.parametrize(
    ("name", "value", "kind"),
    [
        ("json_schema", '{"type": "object"}', "json_schema"),
        ("regex", "a+", "regex"),
        ("ebnf", 'root ::= "a"', "gbnf"),
        ("structural_tag", '{"structures": [], "triggers": []}', "structural_tag"),
    ],
)
def test_structured_output(name: str, value: str, kind: str) -> None:
    client = FakeEngineClient()
    whole(client, sampling_params={**SHORT, name: value})
    (spec,) = client.checked
    assert spec.payload["type"] == kind
    client.constraint_error = RequestError("it is bad", "constraint")
    message = refused(client, text="a", sampling_params={name: value})
    assert f"sampling_params.{name}" in message and "It is bad" in message


def test_other_fields() -> None:
    client = FakeEngineClient()
    whole(
        client, priority=3, extra_key="k", log_metrics=True, modalities=["text"], background=False
    )
    # SGLang serves a higher number first, the engine a lower one.
    assert (client.started[0].priority, client.started[0].namespace) == (-3, "k")


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({}, "text or input_ids"),
        ({"text": "a", "input_ids": [1]}, "text or input_ids"),
        ({"text": ""}, "text"),
        ({"text": ["a", ""]}, "text"),
        ({"text": []}, "text"),
        ({"input_ids": []}, "input_ids"),
        ({"input_ids": [1, "a"]}, "input_ids"),
        ({"input_ids": [[1], []]}, "input_ids"),
        ({"input_ids": [300]}, "input_ids"),
        ({"text": "a", "sampling_params": {"max_new_tokens": -1}}, "max_new_tokens"),
        ({"text": "a", "sampling_params": {"max_new_tokens": 5000}}, "max_new_tokens"),
        ({"text": "a", "sampling_params": {"min_new_tokens": 129}}, "min_new_tokens"),
        ({"text": "a", "sampling_params": {"temperature": "1"}}, "sampling_params.temperature"),
        ({"text": "a", "sampling_params": {"stop_regex": "x"}}, "stop_regex"),
        ({"text": "a", "sampling_params": {"custom_params": {"a": 1}}}, "custom_params"),
        ({"text": "a", "sampling_params": {"frobnicate": 1}}, "sampling_params.frobnicate"),
        ({"text": "a", "sampling_params": {"logit_bias": {"x": 1}}}, "logit_bias"),
        ({"text": "a", "sampling_params": {"stop": [""]}}, "stop"),
        ({"text": "a", "sampling_params": {"regex": "a", "ebnf": "b"}}, "exclude"),
        ({"text": "a", "sampling_params": [{}, {}]}, "sampling_params has 2 entries"),
        ({"text": ["a", "b"], "sampling_params": [{}, {"n": 2}]}, "n and stream_interval"),
        ({"text": ["a"] * 20, "sampling_params": {"n": 128}}, "n times prompts"),
        ({"text": ["a", "b"], "rid": ["x"]}, "rid has 1 entries"),
        ({"text": "a", "return_logprob": [True, True]}, "return_logprob"),
        ({"text": "a", "top_logprobs_num": 21}, "top_logprobs_num"),
        ({"text": "a", "return_logprob": True, "logprob_start_len": 2}, "logprob_start_len"),
        (
            {
                "text": "a",
                "return_logprob": True,
                "logprob_start_len": 0,
                "token_ids_logprob": [1],
            },
            "token_ids_logprob",
        ),
        ({"text": "a", "lora_id": "x"}, "lora_id"),
        ({"text": "a", "image_data": "x"}, "image_data"),
        ({"text": "a", "input_embeds": [[1.0]]}, "input_embeds"),
        ({"text": "a", "return_hidden_states": True}, "return_hidden_states"),
        ({"text": "a", "session_params": {"id": "x"}}, "session_params"),
        ({"text": "a", "custom_logit_processor": "x"}, "custom_logit_processor"),
        ({"text": "a", "bootstrap_room": 1}, "bootstrap_room"),
        ({"text": "a", "background": True}, "background"),
        ({"text": "a", "frobnicate": 1}, "frobnicate"),
    ],
)
def test_bad_requests_have_sglangs_errors(body: dict[str, Any], words: str) -> None:
    assert words in refused(**body)


def test_other_errors_too() -> None:
    client = FakeEngineClient()
    assert list(call(client, "PUT", PATH).json()["error"]) == ["message"]
    assert call(client, "POST", PATH, content=b"{}").status_code == 415
    client.error_at = (0, ValueError("secret"))
    failed = post(PATH, client, text="a")
    assert failed.status_code == 500 and "secret" not in failed.text
    client.error_at = (2, RequestError("no more"))
    (*_, last) = events(post(PATH, client, text="a", stream=True))
    assert last == {"error": {"message": "no more"}}


def during(
    client: FakeEngineClient, requests: list[tuple[str, dict[str, Any]]], abort: dict[str, Any]
) -> list[httpx.Response]:
    """The replies to requests that are aborted once all of them wait."""

    async def run() -> list[httpx.Response]:
        transport = httpx.ASGITransport(
            build_api(lambda: ServedModels(client)), raise_app_exceptions=False
        )
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as http:
            calls = [asyncio.create_task(http.post(path, json=body)) for path, body in requests]
            for _ in range(200):
                await asyncio.sleep(0)
            reply = await http.post("/abort_request", json=abort)
            assert reply.status_code == 200, reply.text
            return await asyncio.gather(*calls)

    async def limited() -> list[httpx.Response]:
        async with asyncio.timeout(10):
            return await run()

    return asyncio.run(limited())


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("abort", [{"rid": "mine"}, {"abort_all": True}])
def test_an_aborted_request_ends_with_what_it_has(stream: bool, abort: dict[str, Any]) -> None:
    client = FakeEngineClient()
    client.hang_at = 2
    body = {"text": "a", "rid": "mine", "sampling_params": SHORT, "stream": stream}
    (reply,) = during(client, [(PATH, body)], abort)
    got = events(reply)[-1] if stream else reply.json()
    assert got["output_ids"] == expected_ids(5, 2) and got["text"] == expected_text(5, 2)
    assert got["meta_info"]["finish_reason"]["type"] == "abort"
    assert got["meta_info"]["completion_tokens"] == 2
    assert client.open == 0 and len(client.aborted) == 1


def test_others_go_on() -> None:
    client = FakeEngineClient()
    client.step_s = 0.001
    bodies = [(PATH, {"text": "a", "rid": rid, "sampling_params": SHORT}) for rid in ("a", "ab")]
    replies_ = during(client, bodies, {"rid": "a"})
    kinds = [reply.json()["meta_info"]["finish_reason"]["type"] for reply in replies_]
    assert kinds == ["abort", "length"]


def test_one_prompt_of_a_batch_is_aborted_with_its_copies() -> None:
    client = FakeEngineClient()
    client.step_s = 0.001
    body = {"text": ["a", "b"], "rid": ["x", "y"], "sampling_params": {**SHORT, "n": 2}}
    (reply,) = during(client, [(PATH, body)], {"rid": "y"})
    kinds = [item["meta_info"]["finish_reason"]["type"] for item in reply.json()]
    assert kinds == ["length", "length", "abort", "abort"]


@pytest.mark.parametrize("rid", ["whole", "whole_1"])
def test_a_batch_has_one_id_and_its_prompts_have_theirs(rid: str) -> None:
    client = FakeEngineClient()
    client.hang_at = 1
    client.step_s = 0.001
    bodies: list[tuple[str, dict[str, Any]]] = [
        (PATH, {"text": ["a", "b"], "rid": "whole", "sampling_params": SHORT})
    ]
    if rid == "whole_1":  # the other prompt would wait for ever
        client.hang_at = None
    (reply,) = during(client, bodies, {"rid": rid})
    kinds = [item["meta_info"]["finish_reason"]["type"] for item in reply.json()]
    assert kinds == (["abort", "abort"] if rid == "whole" else ["length", "abort"])


@pytest.mark.parametrize("rid", ["mine", "cmpl-mine"])
def test_requests_of_other_apis_are_aborted_too(rid: str) -> None:
    client = FakeEngineClient()
    client.hang_at = 2
    body = {"prompt": "a", "request_id": "mine", "seed": 5, "max_tokens": 4}
    (reply,) = during(client, [("/v1/completions", body)], {"rid": rid})
    (choice,) = reply.json()["choices"]
    assert (choice["finish_reason"], choice["text"]) == ("abort", expected_text(5, 2))
    assert reply.json()["usage"]["completion_tokens"] == 2


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}]}),
        ("/v1/messages", {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 9}),
        ("/v1/responses", {"input": "hi"}),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_abort_all_reaches_every_api(path: str, body: dict[str, Any], stream: bool) -> None:
    client = FakeEngineClient()
    client.hang_at = 2
    (reply,) = during(client, [(path, {**body, "stream": stream})], {"abort_all": True})
    assert reply.status_code == 200
    assert any(f'"{word}"' in reply.text for word in ("abort", "max_tokens", "incomplete"))
    assert client.open == 0


def test_a_request_is_aborted_before_it_runs() -> None:
    """While its grammar is checked. It must not run then: an engine might not survive it."""

    class Slow(FakeEngineClient):
        async def check_constraint(self, spec: ConstraintSpec) -> None:
            await asyncio.Event().wait()

    client = Slow()
    body = {"text": ["a", "b"], "rid": "r", "sampling_params": {"regex": "a"}}
    (reply,) = during(client, [(PATH, body)], {"rid": "r"})
    assert [item["meta_info"]["finish_reason"]["type"] for item in reply.json()] == ["abort"] * 2
    assert [item["meta_info"]["prompt_tokens"] for item in reply.json()] == [2, 2]
    assert client.started == []


def test_a_check_that_is_cut_short_is_made_for_the_next_prompt() -> None:
    class SlowAtFirst(FakeEngineClient):
        async def check_constraint(self, spec: ConstraintSpec) -> None:
            self.checked.append(spec)
            if len(self.checked) == 1:
                await asyncio.Event().wait()

    client = SlowAtFirst()
    sampling = {**SHORT, "regex": "a"}
    body = {"text": ["a", "b"], "rid": ["x", "y"], "sampling_params": sampling}
    (reply,) = during(client, [(PATH, body)], {"rid": "x"})
    kinds = [item["meta_info"]["finish_reason"]["type"] for item in reply.json()]
    assert kinds == ["abort", "length"] and len(client.checked) == 2


def test_nothing_is_kept_of_requests_that_have_ended() -> None:
    client = FakeEngineClient()
    whole(client, text=["a", "b"])
    streamed(client)
    refused(client, text="a", sampling_params={"max_new_tokens": 5000})
    assert len(client.started) == 3 and len(client.aborts) == 0


def test_abort_needs_an_id() -> None:
    client = FakeEngineClient()
    for body in ({}, {"rid": ""}, {"rid": "", "abort_all": False}, {"rid": 5}):
        reply = post("/abort_request", client, **body)
        assert reply.status_code == 400 and "rid" in reply.json()["error"]["message"]
    assert post("/abort_request", client, rid="unknown").status_code == 200


@pytest.mark.parametrize("method", ["GET", "POST"])
def test_flush_cache(method: str) -> None:
    client = FakeEngineClient()
    reply = call(client, method, "/flush_cache")
    assert (reply.status_code, reply.text) == (200, "Cache flushed.\n")
    assert reply.headers["content-type"].startswith("text/plain")
    client.refusals = ["replica r1: 3 requests run or wait"]
    reply = call(client, method, "/flush_cache")
    assert reply.status_code == 400 and "r1: 3 requests" in reply.json()["error"]["message"]


def test_pages_of_other_sites_are_refused() -> None:
    client = FakeEngineClient()
    for site, status in (("cross-site", 403), ("same-origin", 200), ("none", 200)):
        headers = {"Sec-Fetch-Site": site}
        for method, path in (("GET", "/flush_cache"), ("POST", "/flush_cache")):
            assert call(client, method, path, headers=headers).status_code == status
        body = {"abort_all": True}
        aborted = call(client, "POST", "/abort_request", headers=headers, json=body)
        assert aborted.status_code == status
        assert call(client, "GET", "/health_generate", headers=headers).status_code == status
    assert client.num_flushes == 4
    text = {"Content-Type": "text/plain"}
    plain = call(client, "POST", "/abort_request", headers=text, content=b'{"abort_all": true}')
    assert plain.status_code == 415


def test_health_generate() -> None:
    client = FakeEngineClient()
    assert call(client, "GET", "/health_generate").status_code == 200
    client.is_healthy = False
    reply = call(client, "GET", "/health_generate")
    assert (reply.status_code, reply.json()) == (503, {"error": {"message": "a worker died"}})


@pytest.mark.parametrize("prefix", ["/", "/get_"])
def test_what_is_served(prefix: str) -> None:
    client = FakeEngineClient()
    info = call(client, "GET", f"{prefix}model_info").json()
    replies.SGLangModelInfo.model_validate(info)
    assert info["is_generation"] and info["served_model_name"] == "fake"
    assert info["max_model_len"] == 256
    server = call(client, "GET", f"{prefix}server_info").json()
    replies.SGLangServerInfo.model_validate(server)
    assert (server["tp_size"], server["log_level"]) == (1, "INFO")
    (state,) = server["internal_states"]
    assert state["max_total_num_tokens"] == server["max_total_num_tokens"] == 4096


def test_the_document_has_every_route() -> None:
    document = call(FakeEngineClient(), "GET", "/openapi.json").json()
    paths = document["paths"]
    assert set(paths["/flush_cache"]) == {"get", "post"}
    ids = [operation["operationId"] for path in paths.values() for operation in path.values()]
    assert len(ids) == len(set(ids))
    assert set(paths["/generate"]["post"]["responses"]["200"]["content"]) == {
        "application/json",
        "text/event-stream",
    }
    assert "text/plain" in paths["/flush_cache"]["post"]["responses"]["200"]["content"]
    assert json.dumps(paths["/abort_request"]["post"]["requestBody"])
