"""The pages' modules that need no browser, in Node.js."""

from __future__ import annotations

import json
import shutil
import subprocess
from typing import Any

import pytest

from tests.support.source_files import ROOT

STATIC = ROOT / "deploy/http/pages/static"
NODE = shutil.which("node")

pytestmark = pytest.mark.skipif(NODE is None, reason="needs Node.js")


def run(module: str, function: str, argument: Any) -> Any:
    script = (
        f"import {{ {function} }} from {json.dumps(str(STATIC / module))};"
        f"console.log(JSON.stringify({function}({json.dumps(argument)})));"
    )
    command = [str(NODE), "--input-type=module", "--no-warnings", "--eval", script]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def figures(tokens: int, **times: float) -> str:
    usage = {
        "completion_tokens": tokens,
        "prompt_tokens": 30,
        "prompt_tokens_details": {"cached_tokens": 16},
    }
    return str(run("figures.js", "figures", {"usage": usage, "started": 1000, **times}))


def test_tokens_that_came_together_have_no_speed() -> None:
    told = "12 tokens, first after 0.30 s, 16 of 30 prompt tokens cached"
    assert figures(12, first=1300, last=1302) == told
    assert figures(12, first=1300, firstTokens=12, last=1900) == told
    assert figures(1, first=1300, last=1300).startswith("1 tokens, first after")


def test_the_speed_is_that_of_what_came_behind_the_first_text() -> None:
    assert "201 tokens, 200 tokens/s, " in figures(201, first=1300, last=2300)
    assert "201 tokens, 101 tokens/s, " in figures(201, first=1300, firstTokens=100, last=2300)


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("plain", [["text", "plain"]]),
        ("use `x` here", [["text", "use "], ["code", "x"], ["text", " here"]]),
        ("``a`b``", [["code", "a`b"]]),
        ("one ` alone", [["text", "one ` alone"]]),
        ("over `two\nlines`", [["text", "over `two\nlines`"]]),
        ("a\n```python\nx = `1`\n\ny\n```\nb", [
            ["text", "a\n"], ["block", "x = `1`\n\ny"], ["text", "b"],
        ]),
        ("```\n```\nb", [["text", "b"]]),
        ("a\n```\nnot yet closed", [["text", "a\n"], ["block", "not yet closed"]]),
        ("```js", [["text", "```js"]]),
        ("```\na\n```\n```\nb\n```", [["block", "a"], ["block", "b"]]),
        ("`<img src=x>`", [["code", "<img src=x>"]]),
    ],
)  # fmt: skip
def test_code_in_backticks(text: str, parts: list[list[str]]) -> None:
    found = run("text_parts.js", "textParts", text)
    assert [[part["kind"], part["text"]] for part in found] == parts


CUT_STREAM = """
globalThis.document = { baseURI: "http://test/" };
globalThis.sessionStorage = { getItem: () => null };
const chunk = (n) => `data: ${JSON.stringify({ id: "c1", n })}\\n\\n`;
const body = (parts, cut) => new ReadableStream({
  pull(controller) {
    if (parts.length) controller.enqueue(new TextEncoder().encode(parts.shift()));
    else if (cut) controller.error(new TypeError("network error"));
    else controller.close();
  },
}, { highWaterMark: 0 });
const asked = [];
const answers = [
  () => new Response(body([chunk(0), chunk(1).slice(0, 9)], false)),
  () => { throw new TypeError("fetch failed"); },
  () => new Response('{"error": {"message": "busy"}}', { status: 429 }),
  () => new Response(body([chunk(1), chunk(2)], true)),
  () => new Response(body([chunk(3), "data: [DONE]\\n\\n"], false)),
];
globalThis.fetch = async (url) => { asked.push(String(url)); return answers.shift()(); };
const { stream } = await import(MODULE);
const got = [];
for await (const one of stream("v1/chat/completions", { method: "POST" })) got.push(one.n);
console.log(JSON.stringify({ got, asked }));
"""


def test_a_stream_that_was_cut_is_read_on() -> None:
    script = CUT_STREAM.replace("MODULE", json.dumps(str(STATIC / "api.js")))
    command = [str(NODE), "--input-type=module", "--no-warnings", "--eval", script]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, done.stderr
    seen = json.loads(done.stdout)
    assert seen["got"] == [0, 1, 2, 3]
    at = "http://test/v1/chat/completions"
    counts = [url.removeprefix(f"{at}/c1?stream=true&starting_after=") for url in seen["asked"][1:]]
    # The first loss, a server that is away, one that is busy, the second loss.
    assert seen["asked"][0] == at and counts == ["1", "1", "1", "3"]
