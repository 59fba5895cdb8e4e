"""What a process is told about waiting compute threads, before torch is loaded."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from engine.process import openmp

NAMES = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT")


@pytest.mark.parametrize(
    "given, expected",
    [
        ({}, ("PASSIVE", openmp.SPIN_COUNT)),
        ({"OMP_WAIT_POLICY": "passive"}, ("passive", openmp.SPIN_COUNT)),
        ({"GOMP_SPINCOUNT": "0"}, ("PASSIVE", "0")),
        # libgomp would let the count outrank it.
        ({"OMP_WAIT_POLICY": "ACTIVE"}, ("ACTIVE", None)),
    ],
)
def test_users_settings_win(
    given: dict[str, str],
    expected: tuple[str | None, ...],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in NAMES:
        monkeypatch.delenv(name, raising=False)
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    policy = openmp.wait_policy()
    assert tuple(policy.get(name) for name in NAMES) == expected


def test_llm_sets_it_before_torch_is_loaded() -> None:
    code = (
        "import engine, os, sys; assert 'torch' not in sys.modules; engine.LLM;"
        f"assert 'torch' in sys.modules; print(*(os.environ[n] for n in {NAMES}))"
    )
    env = {name: value for name, value in os.environ.items() if name not in NAMES}
    done = subprocess.run(
        [sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == ["PASSIVE", openmp.SPIN_COUNT]
