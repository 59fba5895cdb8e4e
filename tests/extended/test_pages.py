"""The pages `/chat` and `/status` in Debian's Chromium, driven by playwright-core."""

from __future__ import annotations

import hashlib
import json
import os
import secrets
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.support.debian import install
from tests.support.http_server import manta
from tests.support.source_files import ROOT

pytestmark = [pytest.mark.optional_tool, pytest.mark.timeout(600)]
FOLDER = Path(__file__).with_name("pages")
EVIL = "<img src=x onerror=\"document.title='taken'\"><script>document.title='taken'</script>"
SHOTS = "MANTA_PAGE_SHOTS"
"""Names a folder for screenshots; those in docs/images were made by this test."""
NEVER = 4
"""A special token that the model doesn't give: its answers are as long as they may be."""


@pytest.fixture(scope="module")
def modules(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """playwright-core and axe-core, as the lock file pins them."""
    install({"/usr/bin/chromium": "chromium"})
    npm = shutil.which("npm")
    if npm is None:
        pytest.skip("needs Node.js and npm")
    folder = tmp_path_factory.mktemp("modules")
    for name in ("package.json", "package-lock.json"):
        shutil.copy(FOLDER / name, folder)
    command = [npm, "ci", "--ignore-scripts", "--no-audit", "--no-fund"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return folder / "node_modules"


@pytest.fixture(scope="module")
def seen(modules: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Any]]:
    """What `check.mjs` saw of a server with two engines and a key."""
    folder = tmp_path_factory.mktemp("pages")
    key = f"sk-{secrets.token_hex(24)}"
    digest = hashlib.sha256(key.encode()).hexdigest()
    keys = folder / "keys.yaml"
    keys.write_text(yaml.safe_dump({"keys": [{"name": "a", "sha256": digest, "role": "admin"}]}))
    model = Path(shutil.copytree(ROOT / "models/manta-small", folder / "model"))
    for name, changes in (
        ("config.json", {"max_position_embeddings": 32_768, "eos_token_id": NEVER}),
        ("generation_config.json", {"eos_token_id": NEVER}),
    ):
        config = json.loads((model / name).read_text())
        (model / name).write_text(json.dumps(config | changes))
    settings = {"model": str(model), "num_replicas": 2, "api_keys_file": str(keys)}
    with manta(**settings, cpu_threads=1) as server:
        given = {
            "url": server.base_url,
            "key": key,
            "modules": str(modules),
            "profile": str(folder / "profile"),
            "shots": os.environ.get(SHOTS, ""),
        }
        command = ["node", str(FOLDER / "check.mjs"), json.dumps(given)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=400, check=False)
        assert done.returncode == 0, done.stderr
        found = json.loads(done.stdout)
        print(json.dumps(found, indent=1))
        assert "failed" not in found, found["failed"]
        yield found


def test_text_grows_while_it_comes(seen: dict[str, Any]) -> None:
    assert seen["growths"] >= 5
    assert "400 tokens" in seen["figures"] and "tokens/s" in seen["figures"]
    first, second = (
        int(seen[k].split("first after")[1].split(" s, ")[1].split()[0].replace(",", ""))
        for k in ("figures", "secondFigures")
    )
    assert first == 0 and second > 0, "prompt tokens cached"


def test_stop_ends_the_request(seen: dict[str, Any]) -> None:
    assert seen["runningBeforeStop"] == 1
    # 0.6 s on two quiet cores; the page gives up after 10 s, where 30,000 tokens would go on.
    assert seen["idleAfterMs"] < 10_000
    assert seen["stopFigures"].startswith("stopped")


def test_a_wrong_key_is_explained(seen: dict[str, Any]) -> None:
    assert seen["wrongKey"] == "The API key is not valid."
    assert "API key" in seen["statusWithoutKey"]


def test_text_stays_text(seen: dict[str, Any]) -> None:
    assert seen["prompt"] == f"def first(x): {EVIL}" and seen["output"] == EVIL
    assert seen["images"] == 0 and seen["title"] == "Manta: chat"


def test_code_is_shown_as_code(seen: dict[str, Any]) -> None:
    assert (seen["code"], seen["block"]) == ("f(x)", "f(1)")


def test_tokens_that_came_together_have_no_speed(seen: dict[str, Any]) -> None:
    assert seen["togetherFigures"].startswith("12 tokens, first after")


def test_send_stands_out(seen: dict[str, Any]) -> None:
    assert seen["isSendEnabled"] and seen["sendGround"] == "rgb(11, 110, 143)"
    assert seen["newGround"] != seen["sendGround"]


def test_what_is_not_there_is_not_shown(seen: dict[str, Any]) -> None:
    """Keys of a keyboard on a phone, a field for keys where there are none."""
    assert (seen["hintWithKeys"], seen["hintOnPhones"]) == (True, False)
    assert seen["fieldsWithoutKeys"] == 0


def test_a_lost_engine_is_seen_and_the_chat_goes_on(seen: dict[str, Any]) -> None:
    assert seen["redAfterMs"] < 6000  # 1.1 s on two quiet cores; 3 s is the aim
    assert "lost" in seen["lostText"] and seen["lostColour"] == "rgb(163, 24, 42)"
    assert seen["greenAfterMs"] > seen["redAfterMs"]
    assert seen["chatOpenWhenGreen"] == 1 and seen["chatGrewAfterKill"] > 0
    assert seen["chatErrors"] == 0


def test_the_timeline_opens(seen: dict[str, Any]) -> None:
    assert seen["timelineSpans"] > 10 and seen["timelineRows"] >= 3 and seen["saved"] > 10


def test_nothing_foreign_no_error_and_no_barrier(seen: dict[str, Any]) -> None:
    assert seen["foreign"] == [] and seen["consoleErrors"] == [] and seen["violations"] == []
