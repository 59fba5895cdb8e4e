"""Conversations go on whatever the model wrote: no request fails because of an earlier reply, and
no word is lost on the way from the model to the client and back."""

from __future__ import annotations

import asyncio
import json
import random
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import count
from typing import Any, NamedTuple

import httpx
import pytest

from deploy.http.api import build_api
from deploy.http.served_models import ServedModels
from tests.support.scripted_client import ScriptedClient
from tests.unit.tokenizer.call_templates import TEMPLATES
from tests.unit.tokenizer.chat_shapes import QWEN
from tests.unit.tokenizer.tokenizer_kinds import make_tokenizer

NUM_CONVERSATIONS = 200
STOP = "STOP"
"""Stands in thoughts, and is a stop string of every request."""
WORD = re.compile(r"w\d+w")


class Model(NamedTuple):
    """A template and how its model writes calls. `keeps_text`: the template has a place for text
    beside calls."""

    template: str
    tool_format: str
    call: str
    keeps_text: bool = True


HERMES = '<tool_call>\n{"name": "NAME", "arguments": ARGS}\n</tool_call>'
MODELS = [
    Model(QWEN, "hermes", HERMES),
    Model(TEMPLATES["deepseek"], "hermes", HERMES),
    Model(
        TEMPLATES["mistral"],
        "mistral",
        '[TOOL_CALLS][{"name": "NAME", "arguments": ARGS}]',
        keeps_text=False,
    ),
    Model(TEMPLATES["one_call"], "llama3_json", '{"name": "NAME", "parameters": ARGS}'),
    Model(TEMPLATES["items"], "hermes", HERMES),
    Model(TEMPLATES["plain"], "hermes", HERMES),
    Model(TEMPLATES["text_first"], "hermes", HERMES),
    Model(TEMPLATES["absent"], "hermes", HERMES),
]
BREAKS: list[Callable[[str], str]] = [
    lambda word: f'{{"city": "{word}"}}',
    lambda word: f'{{"city": "{word}"',
    lambda word: f'{{"city": "{word}',
    lambda word: f'{{"city": "{word}"}}}}',
    lambda word: f"{{'city': '{word}'}}",
    lambda word: f'{{city: "{word}"}}',
    lambda word: f'{{"city": "{word}",}}',
    lambda word: f'{{"city": "{word}", "at": NaN}}',
    lambda word: f'["{word}"]',
    lambda word: f'"{word}"',
    lambda word: json.dumps(f'{{"city": "{word}"}}'),
    lambda word: "null",
    lambda word: '""',
    lambda word: f'{{"city": "{word}\n"}}',
    lambda word: f'{{"city": "{word}\\x"}}',
    lambda word: f'{{"city": "{word}\\ud800"}}',
    lambda word: f'{{"city": "{word}", "is_near": True}}',
    lambda word: f'{{"city": "{word}" /* near */}}',
    lambda word: f'{{"city": "{word}", "at": {10**30}}}',
    lambda word: '{"a":' * 150 + f'"{word}"' + "}" * 150,
    lambda word: f'{{"city": "{word}", "city": "near"}}',
    lambda word: f'{{"{word}": {{"<|im_end|>": "</tool_call>"}}}}',
]
TOOL_NAMES = ("look", "wait")
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}}


@dataclass
class Said:
    """What a client read of one reply, and the messages that it sends back for it."""

    text: str
    """All that the reply holds."""
    sent_back: list[dict[str, Any]] = field(default_factory=list)
    kept: str = ""
    """What the next prompt must hold: not thoughts, which templates leave out."""
    beside: str = ""
    """Text beside calls."""
    calls: list[str] = field(default_factory=list)
    """Their ids."""


class Turn(NamedTuple):
    """What the model writes, behind what the client wrote of the reply already."""

    prefill: str
    script: str
    max_tokens: int
    doubled: frozenset[str] = frozenset()
    """Words whose key comes again: an object has the last of them."""


def write_turn(rng: random.Random, words: Iterator[str], model: Model) -> Turn:
    """A reply: maybe a thought, maybe text, maybe calls, maybe cut."""
    thought = f"<think>Hm {next(words)} {STOP} {next(words)}.</think>\n\n"
    text = f"I say {next(words)}."
    calls = [
        model.call.replace("NAME", rng.choice(TOOL_NAMES)).replace(
            "ARGS", rng.choice(BREAKS)(next(words))
        )
        for _ in range(rng.choice([0, 1, 1, 2]))
    ]
    separator = "; " if model.tool_format == "llama3_json" else "\n"
    has_text = not calls or (rng.random() < 0.5 and model.tool_format != "llama3_json")
    answer = (text if has_text else "") + separator.join(calls)
    kind = rng.choice(["thought", "thought", "prefill", "answer", "nothing"])
    if kind == "nothing":
        return Turn("", thought[: rng.randint(0, len(thought))], 2000)
    script = answer if kind == "answer" else thought + answer
    max_tokens = rng.randint(1, 120) if rng.random() < 0.3 else 2000
    at = script.index(" ") if kind == "prefill" else 0
    doubled = frozenset(re.findall(r'"city": "(\w+)", "city"', "".join(calls)))
    return Turn(script[:at], script[at:], max_tokens, doubled)


def foreign(rng: random.Random, id: str) -> str:
    """An id as some other vendor's server makes them."""
    style = rng.choice(["{}", "functions.look:{}", "toolu_{}", "é {}", "{}" * 9, "x"])
    return style.replace("{}", str(rng.randint(0, 9))) if rng.random() < 0.5 else id


class Dialect:
    """One conversation in an API: what is asked, and what the client makes of replies."""

    path: str
    prefills = False
    """Whether requests can begin the reply."""
    has_objects = False
    """Whether the arguments of a reply in one piece are an object, and no text."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self.history: list[dict[str, Any]] = []

    def body(self, turn: Turn) -> dict[str, Any]:
        """The request."""
        raise NotImplementedError

    def read(self, reply: dict[str, Any]) -> Said:
        """What a reply holds."""
        raise NotImplementedError

    def gather(self, events: list[dict[str, Any]]) -> dict[str, Any]:
        """The reply that the events of a stream are."""
        raise NotImplementedError

    def user(self, text: str) -> None:
        """The user says something."""
        self.history.append({"role": "user", "content": text})

    def results(self, ids: list[str], words: Iterator[str]) -> str:
        """The tools answer. Returns what they say."""
        raise NotImplementedError


class Chat(Dialect):
    path = "/v1/chat/completions"
    prefills = True

    def body(self, turn: Turn) -> dict[str, Any]:
        head = [{"role": "assistant", "content": turn.prefill}] if turn.prefill else []
        return {
            "messages": self.history + head,
            "continue_final_message": bool(head),
            "max_tokens": turn.max_tokens,
            "stop": STOP,
            "tools": [
                {"type": "function", "function": {"name": name, "parameters": SCHEMA}}
                for name in TOOL_NAMES
            ],
        }

    def gather(self, events: list[dict[str, Any]]) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": None, "tool_calls": []}
        for event in events:
            for choice in event["choices"]:
                delta = choice["delta"]
                for key in ("content", "reasoning_content", "reasoning"):
                    if delta.get(key) is not None:
                        message[key] = (message.get(key) or "") + delta[key]
                for piece in delta.get("tool_calls", ()):
                    if piece["index"] == len(message["tool_calls"]):
                        message["tool_calls"].append(piece)
                    else:
                        call = message["tool_calls"][piece["index"]]
                        call["function"]["arguments"] += piece["function"]["arguments"]
        return {"choices": [{"message": message}]}

    def read(self, reply: dict[str, Any]) -> Said:
        message = reply["choices"][0]["message"]
        calls = message.get("tool_calls") or []
        for call in calls:
            call["id"] = foreign(self._rng, call["id"])
        functions = "".join(c["function"]["name"] + c["function"]["arguments"] for c in calls)
        content = message.get("content") or ""
        self.history.append(self._rng.choice([message, {**message, "refusal": None}]))
        return Said(
            (message.get("reasoning_content") or "") + content + functions,
            kept=functions + ("" if calls else content),
            beside=content if calls else "",
            calls=[call["id"] for call in calls],
        )

    def results(self, ids: list[str], words: Iterator[str]) -> str:
        texts = [f"It gave {next(words)}." for _ in ids]
        self.history += [
            {"role": "tool", "tool_call_id": id, "content": text}
            for id, text in zip(ids, texts, strict=True)
        ]
        return "".join(texts)


class Responses(Dialect):
    path = "/v1/responses"

    def body(self, turn: Turn) -> dict[str, Any]:
        return {
            "input": self.history,
            "max_output_tokens": turn.max_tokens,
            "stop": [STOP],
            "tools": [
                {"type": "function", "name": name, "parameters": SCHEMA} for name in TOOL_NAMES
            ],
        }

    def gather(self, events: list[dict[str, Any]]) -> dict[str, Any]:
        assert events[-1]["type"] in ("response.completed", "response.incomplete")
        done = [event["item"] for event in events if event["type"] == "response.output_item.done"]
        reply: dict[str, Any] = events[-1]["response"]
        assert done == reply["output"]
        return reply

    def read(self, reply: dict[str, Any]) -> Said:
        said = Said("")
        texts: list[str] = []
        for item in reply["output"]:
            if item["type"] == "function_call":
                item["call_id"] = foreign(self._rng, item["call_id"])
                said.calls.append(item["call_id"])
                said.kept += item["name"] + item["arguments"]
                continue
            text = "".join(part["text"] for part in item["content"])
            said.text += text
            texts += [text] if item["type"] == "message" else []
        said.text += said.kept
        if said.calls:
            said.beside = "".join(texts)
        else:
            said.kept += "".join(texts)
        self.history += reply["output"]
        return said

    def results(self, ids: list[str], words: Iterator[str]) -> str:
        texts = [f"It gave {next(words)}." for _ in ids]
        self.history += [
            {"type": "function_call_output", "call_id": id, "output": text}
            for id, text in zip(ids, texts, strict=True)
        ]
        return "".join(texts)


class Messages(Dialect):
    path = "/v1/messages"
    prefills = True
    has_objects = True

    def body(self, turn: Turn) -> dict[str, Any]:
        head = [{"role": "assistant", "content": turn.prefill}] if turn.prefill else []
        return {
            "messages": self.history + head,
            "max_tokens": turn.max_tokens,
            "stop_sequences": [STOP],
            "thinking": {"type": "enabled", "budget_tokens": 1024},
            "tools": [{"name": name, "input_schema": SCHEMA} for name in TOOL_NAMES],
        }

    def gather(self, events: list[dict[str, Any]]) -> dict[str, Any]:
        content: list[dict[str, Any]] = []
        for event in events:
            if event["type"] == "content_block_start":
                content.append({**event["content_block"], "input_text": ""})
            elif event["type"] == "content_block_delta":
                (key,) = event["delta"].keys() - {"type"}
                name = "input_text" if key == "partial_json" else key
                content[-1][name] += event["delta"][key]
        for block in content:
            text = block.pop("input_text")
            if block["type"] == "tool_use":
                # A client that can't read the input sends back what it has.
                try:
                    block["input"] = json.loads(text or "{}")
                    again = json.dumps(block["input"], ensure_ascii=False, allow_nan=False)
                    assert set(WORD.findall(again.encode().decode())) == set(WORD.findall(text))
                except (ValueError, AssertionError):
                    block["input"] = text
        return {"content": content}

    def read(self, reply: dict[str, Any]) -> Said:
        said = Said("")
        texts = ""
        for block in reply["content"]:
            match block["type"]:
                case "thinking":
                    said.text += block["thinking"]
                case "text":
                    texts += block["text"]
                case "tool_use":
                    block["id"] = foreign(self._rng, block["id"])
                    said.calls.append(block["id"])
                    given = block["input"]
                    said.kept += block["name"]
                    said.kept += given if isinstance(given, str) else json.dumps(given)
        said.text += texts + said.kept
        if said.calls:
            said.beside = texts
        else:
            said.kept += texts
        self.history.append({"role": "assistant", "content": reply["content"]})
        return said

    def results(self, ids: list[str], words: Iterator[str]) -> str:
        texts = [f"It gave {next(words)}." for _ in ids]
        blocks = [
            {"type": "tool_result", "tool_use_id": id, "content": text}
            for id, text in zip(ids, texts, strict=True)
        ]
        self.history.append({"role": "user", "content": blocks})
        return "".join(texts)


class Text(Dialect):
    """A conversation that the client writes as one text. Replies are text, so that nothing is told
    from it."""

    prefills = True

    def __init__(self, rng: random.Random) -> None:
        super().__init__(rng)
        self._prompt = ""

    def user(self, text: str) -> None:
        self._prompt += f"[INST]{text}[/INST]"

    def prompt(self, turn: Turn) -> str:
        """What the model goes on with."""
        self._prompt += turn.prefill
        return self._prompt

    def read(self, reply: dict[str, Any]) -> Said:
        text = self.text_of(reply)
        self._prompt += text
        return Said(text, kept=text)

    def text_of(self, reply: dict[str, Any]) -> str:
        """The text of a reply."""
        raise NotImplementedError


class Completions(Text):
    path = "/v1/completions"

    def body(self, turn: Turn) -> dict[str, Any]:
        stop = {"stop": STOP} if turn.prefill else {}
        return {"prompt": self.prompt(turn), "max_tokens": turn.max_tokens, **stop}

    def gather(self, events: list[dict[str, Any]]) -> dict[str, Any]:
        return {"choices": [{"text": "".join(e["choices"][0]["text"] for e in events)}]}

    def text_of(self, reply: dict[str, Any]) -> str:
        text: str = reply["choices"][0]["text"]
        return text


class Generate(Text):
    path = "/generate"

    def body(self, turn: Turn) -> dict[str, Any]:
        stop = {"stop": STOP} if turn.prefill else {}
        return {
            "text": self.prompt(turn),
            "sampling_params": {"max_new_tokens": turn.max_tokens, **stop},
        }

    def gather(self, events: list[dict[str, Any]]) -> dict[str, Any]:
        return events[-1]

    def text_of(self, reply: dict[str, Any]) -> str:
        text: str = reply["text"]
        return text


DIALECTS: list[type[Dialect]] = [Chat, Responses, Messages, Completions, Generate]


def events_of(reply: httpx.Response) -> list[dict[str, Any]]:
    lines = [line for line in reply.text.split("\n") if line.startswith("data: ")]
    found = [json.loads(line[6:]) for line in lines if line != "data: [DONE]"]
    assert not any("error" in event and event["error"] for event in found), found[-1]
    return found


async def converse(
    http: httpx.AsyncClient,
    client: ScriptedClient,
    model: Model,
    dialect: Dialect,
    seed: int,
    is_stream: bool,
) -> None:
    """One conversation, of a few turns."""
    rng = random.Random(seed)
    words = (f"w{number}w" for number in count(seed * 1000))
    dialect.user(f"I ask {next(words)}.")
    kept = ""
    for _ in range(rng.randint(2, 4)):
        turn = write_turn(rng, words, model)
        if not dialect.prefills:
            turn = turn._replace(prefill="", script=turn.prefill + turn.script)
        client.script = turn.script
        body = dialect.body(turn) | ({"stream": True} if is_stream else {})
        reply = await http.post(dialect.path, json=body)
        assert reply.status_code == 200, (reply.text, body)
        said = dialect.read(dialect.gather(events_of(reply)) if is_stream else reply.json())
        request = client.started[-1]
        prompt = client.tokenizer.decode(request.prompt_ids, skip_special_tokens=False)
        lost = set(WORD.findall(kept)) - set(WORD.findall(prompt))
        assert not lost, (lost, body, prompt)
        ids = client.tokenizer.encode(turn.script, add_special_tokens=False)
        written = client.tokenizer.decode(ids[: turn.max_tokens], skip_special_tokens=False)
        lost = set(WORD.findall(written)) - set(WORD.findall(said.text))
        if dialect.has_objects and not is_stream:
            lost -= turn.doubled
        assert not lost, (lost, written, reply.text)
        kept += said.kept + (said.beside if model.keeps_text else "")
        if said.calls:
            kept += dialect.results(said.calls, words)
        else:
            dialect.user(f"I ask {next(words)}.")


@pytest.mark.parametrize("is_stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("kind", DIALECTS)
def test_conversations_go_on(kind: type[Dialect], is_stream: bool) -> None:
    async def run() -> None:
        for number, model in enumerate(MODELS):
            client = ScriptedClient(make_tokenizer("byte_level", model.template), model.tool_format)
            transport = httpx.ASGITransport(build_api(lambda: ServedModels(client)))  # noqa: B023
            async with httpx.AsyncClient(transport=transport, base_url="http://test") as http:
                for seed in range(number, NUM_CONVERSATIONS, len(MODELS)):
                    dialect = kind(random.Random(seed))
                    await converse(http, client, model, dialect, seed, is_stream)

    asyncio.run(run())
