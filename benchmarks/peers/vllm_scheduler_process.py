"""`VllmScheduler`: vLLM's scheduler, measured in a process of the peer's environment."""

from __future__ import annotations

import json
import subprocess
import tempfile
from dataclasses import asdict
from pathlib import Path

from benchmarks.common import REPO_ROOT
from benchmarks.decode_load import DecodeLoad, Measured
from benchmarks.peers import vllm_cpu

LOG_LINES = 15


class VllmScheduler:
    """Runs benchmarks/peers/vllm_scheduler.py, which is idle between measurements."""

    def __init__(self, python: Path, model: Path) -> None:
        self._log = tempfile.TemporaryFile("w+")  # noqa: SIM115 (lives as long as the process)
        env = vllm_cpu.serve_env(python, bind="auto", kv_gib=1)
        self._process = subprocess.Popen(
            [str(python), "-m", "benchmarks.peers.vllm_scheduler", str(model)],
            cwd=REPO_ROOT,
            env=env | {"VLLM_LOGGING_LEVEL": "WARNING"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
        )

    def measure(self, load: DecodeLoad, asynchronous: bool) -> Measured:
        """Measure one load. Raises `PeerSetupError` if the process ends instead of answering."""
        assert self._process.stdin is not None and self._process.stdout is not None
        question = json.dumps({**asdict(load), "asynchronous": asynchronous})
        try:
            print(question, file=self._process.stdin, flush=True)
            answer = self._process.stdout.readline()
        except BrokenPipeError:
            answer = ""
        if not answer:
            self._log.seek(0)
            tail = "\n".join(self._log.read().splitlines()[-LOG_LINES:])
            raise vllm_cpu.PeerSetupError(f"vLLM's scheduler can't be measured:\n{tail}")
        return Measured(**json.loads(answer))

    def __enter__(self) -> VllmScheduler:
        return self

    def __exit__(self, *_: object) -> None:
        try:
            self._process.communicate(timeout=10)  # closes its input, so that it ends
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.communicate()
        self._log.close()
