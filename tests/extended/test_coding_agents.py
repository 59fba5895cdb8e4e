"""Claude Code and codex, as npm has them, finish a task on the real server.

The model is scripted (`tests/support/scripted_model.py`). Each task reads and writes files in a
folder, and is long enough that the agent has to compact its conversation.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from benchmarks.common import REPO_ROOT
from tests.support.http_server import manta
from tests.support.scripted_model import call, make_scripted_model

AGENTS = REPO_ROOT / ".peers" / "agents"
PACKAGES = ("@anthropic-ai/claude-code", "@openai/codex")
LONG = "seq -s ' ' 1 3000"
"""A command with an output of some 14 kB."""

pytestmark = pytest.mark.timeout(600)


@pytest.fixture(scope="module")
def programs() -> Path:
    """The folder of the installed programs."""
    if shutil.which("npm") is None:
        pytest.skip("needs npm")
    AGENTS.mkdir(parents=True, exist_ok=True)
    if not (AGENTS / "node_modules" / ".bin" / "codex").exists():
        command = ["npm", "install", "--no-fund", "--no-audit", "--prefix", str(AGENTS), *PACKAGES]
        subprocess.run(command, check=True, capture_output=True, timeout=300)
        # npm may have left out the script that puts the program in its place.
        subprocess.run(
            ["node", str(AGENTS / "node_modules" / PACKAGES[0] / "install.cjs")],
            check=True,
            capture_output=True,
            timeout=60,
        )
    return AGENTS / "node_modules" / ".bin"


@pytest.fixture
def scratch(tmp_path: Path) -> Iterator[Path]:
    """Where an agent works."""
    folder = tmp_path / "scratch"
    folder.mkdir()
    yield folder


def run(command: list[str], scratch: Path, **env: str) -> subprocess.CompletedProcess[str]:
    """Run an agent that knows nothing but this server."""
    environ = {"PATH": os.environ["PATH"], "HOME": str(scratch.parent), **env}
    return subprocess.run(
        command,
        cwd=scratch,
        env=environ,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )


def test_claude_code(programs: Path, scratch: Path, tmp_path: Path) -> None:
    path = str(scratch / "a.txt")
    steps = [
        call("Write", {"file_path": path, "content": "alpha\n"}),
        call("Read", {"file_path": path}),
        call("Edit", {"file_path": path, "old_string": "alpha", "new_string": "beta"}),
        *[call("Bash", {"command": LONG, "description": "Counts"})] * 5,
        call("Bash", {"command": "cat a.txt a.txt > b.txt", "description": "Copies"}),
    ]
    options = make_scripted_model(
        tmp_path / "model",
        steps,
        "Finished.",
        summary_sign="CRITICAL: Respond with TEXT ONLY",
        summary="<summary>All is well. NUMBER</summary>",
        context=60_000,
    )
    with manta(**options) as server:
        done = run(
            [
                *(str(programs / "claude"), "-p", "Do it.", "--output-format", "stream-json"),
                *("--verbose", "--dangerously-skip-permissions"),
            ],
            scratch,
            ANTHROPIC_BASE_URL=server.base_url,
            ANTHROPIC_API_KEY="none",
            ANTHROPIC_MODEL="scripted",
            CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC="1",
            IS_SANDBOX="1",
        )
        events: list[dict[str, Any]] = [json.loads(line) for line in done.stdout.splitlines()]
        assert done.returncode == 0, done.stdout[-3000:] + done.stderr
        assert events[-1]["result"] == "Finished.", events[-1]
    assert (scratch / "b.txt").read_text() == "beta\nbeta\n"
    results = [
        block
        for event in events
        if event["type"] == "user" and isinstance(event["message"]["content"], list)
        for block in event["message"]["content"]
        if block["type"] == "tool_result"
    ]
    assert len(results) == len(steps)
    assert not any(block.get("is_error") for block in results), results
    compacted = [event for event in events if event.get("subtype") == "compact_boundary"]
    assert len(compacted) == 1, [event["type"] for event in events]


def test_codex(programs: Path, scratch: Path, tmp_path: Path) -> None:
    def command(text: str) -> str:
        return call("exec_command", {"cmd": text})

    steps = [
        command("echo alpha > a.txt"),
        command("cat a.txt"),
        command("sed -i s/alpha/beta/ a.txt"),
        *[command(LONG)] * 5,
        command("cat a.txt a.txt > b.txt"),
    ]
    options = make_scripted_model(
        tmp_path / "model",
        steps,
        "Finished.",
        summary_sign="CONTEXT CHECKPOINT COMPACTION",
        summary="All is well. NUMBER",
        context=100_000,
    )
    settings = tmp_path / ".codex"
    settings.mkdir()
    with manta(**options) as server:
        (settings / "config.toml").write_text(
            f"""
model = "scripted"
model_provider = "manta"
model_auto_compact_token_limit = 40000
[model_providers.manta]
name = "manta"
base_url = "{server.base_url}/v1"
wire_api = "responses"
"""
        )
        done = run(
            [
                *(str(programs / "codex"), "exec", "--json", "--skip-git-repo-check"),
                *("--dangerously-bypass-approvals-and-sandbox", "Do it."),
            ],
            scratch,
        )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert (scratch / "b.txt").read_text() == "beta\nbeta\n"
    events: list[dict[str, Any]] = [json.loads(line) for line in done.stdout.splitlines()]
    items = [event["item"] for event in events if event["type"] == "item.completed"]
    runs = [item for item in items if item["type"] == "command_execution"]
    assert [item["exit_code"] for item in runs] == [0] * len(steps)
    assert items[-1]["text"] == "Finished." and events[-1]["type"] == "turn.completed"
    # The only complaint is that codex has no price list for this model.
    said = [item["message"] for item in items if item["type"] == "error"]
    assert all("Model metadata" in message for message in said), said
    (session,) = settings.glob("sessions/**/*.jsonl")
    kinds = [json.loads(line)["type"] for line in session.read_text().splitlines()]
    assert kinds.count("compacted") == 1, kinds
