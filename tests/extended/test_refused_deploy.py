"""`serve deploy` of configs that are refused, over an application that serves."""

from __future__ import annotations

import concurrent.futures
import copy
import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import httpx
import pytest

from benchmarks.common import REPO_ROOT
from deploy.start.target import load_target
from tests.support.launches import MODEL, Started, started
from tests.support.processes import find_program, launch_mark

STREAMS = 32
SETTINGS = ["device=simulated", "max_total_tokens=1000000"]
REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"nonsense": 1}, "unknown key 'nonsense'"),
    ({"model": "/nowhere/at-all"}, "/nowhere/at-all"),
    ({"tp_size": 0}, "tp_size"),
    ({"tp_size": "two"}, "tp_size"),
    ({"page_size": -1}, "page_size"),
    ({"device": "abacus"}, "device"),
    ({"attention_backend": "none"}, "attention_backend"),
    ({"num_replicas": -3}, "num_replicas"),
    ({"api_keys_file": "/nowhere/keys.yaml"}, "/nowhere/keys.yaml"),
    ({"schedule_policy": "whim"}, "schedule_policy"),
]

_DEPLOY = """
import json, sys, time, ray
from ray.serve.context import _get_global_client
from ray.serve.schema import ServeDeploySchema
ray.init(address=sys.argv[1], namespace="serve", log_to_driver=False)
client = _get_global_client()
for line in sys.stdin:
    client.deploy_apps(ServeDeploySchema.model_validate(json.loads(line)))
    while True:
        app = client.get_serve_details()["applications"]["llm"]
        if app["status"].value in ("DEPLOY_FAILED", "RUNNING"):
            break
        time.sleep(0.1)
    print(json.dumps([app["status"].value, app["message"]]), flush=True)
"""


def stream(launch: Started, number: int, over: threading.Event) -> int:
    """Number of streams that ended as they should, one after the other until `over`."""
    body = {"prompt": f"x{number}", "max_tokens": 400, "ignore_eos": True, "stream": True}
    done = 0
    while not over.is_set():
        with httpx.stream("POST", f"{launch.url}/v1/completions", json=body, timeout=120) as reply:
            assert reply.status_code == 200, reply.read()
            lines = [line for line in reply.iter_lines() if line]
        assert lines[-1] == "data: [DONE]", lines[-1]
        assert [line for line in lines if line.startswith('data: {"error"')] == []
        done += 1
    return done


def watch_health(launch: Started, over: threading.Event) -> list[str]:
    """What `/health` and `/ping` complained of."""
    wrong = []
    while not over.is_set():
        for probe in ("health", "ping"):
            reply = httpx.get(f"{launch.url}/{probe}", timeout=30)
            if reply.status_code != 200:
                wrong.append(reply.text)
        time.sleep(0.1)
    return wrong


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "refused", [REFUSED[:3], pytest.param(REFUSED[3:], marks=pytest.mark.full_chaos)]
)
def test_refused_deploys_leave_what_serves_alone(
    tmp_path: Path, refused: list[tuple[dict[str, Any], str]]
) -> None:
    options = [word for setting in SETTINGS for word in ("--set", setting)]
    with started([MODEL, *options], tmp_path) as launch:
        launch.wait_ready()
        raylet = find_program(launch_mark(launch.process.pid), "raylet")
        config = load_target(MODEL, SETTINGS, port=launch.port).config
        over = threading.Event()
        with concurrent.futures.ThreadPoolExecutor(STREAMS + 1) as pool:
            health = pool.submit(watch_health, launch, over)
            streams = [pool.submit(stream, launch, number, over) for number in range(STREAMS)]
            try:
                told = deploy_each(
                    [args for args, _ in refused],
                    raylet.options["gcs-address"],
                    raylet.environment,
                    config,
                )
            finally:
                over.set()
        assert health.result() == []
        assert all(done.result() for done in streams)
        for (args, fault), (status, message) in zip(refused, told, strict=True):
            assert status == "DEPLOY_FAILED", args
            assert fault in message, (args, message[-500:])
        assert launch.stop() == 0


def deploy_each(
    refused: list[dict[str, Any]], address: str, environment: dict[str, str], config: dict[str, Any]
) -> list[tuple[str, str]]:
    """Status and message of the application after each deploy of a config with these arguments."""
    lines = []
    for args in refused:
        bad = copy.deepcopy(config)
        bad["applications"][0]["args"] |= args
        lines.append(json.dumps(bad))
    done = subprocess.run(
        [sys.executable, "-c", _DEPLOY, address],
        input="\n".join(lines),
        capture_output=True,
        text=True,
        cwd=REPO_ROOT,
        env={**os.environ, **{k: v for k, v in environment.items() if k.startswith("RAY_AUTH")}},
        timeout=600,
        check=True,
    )
    return [tuple(json.loads(line)) for line in done.stdout.splitlines() if line.startswith("[")]
