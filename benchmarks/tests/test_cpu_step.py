"""benchmarks/cpu_step.py runs, its bare loop with the kernels' arguments of today."""

from __future__ import annotations

import json

import pytest

from benchmarks import cpu_step
from benchmarks.common import REPO_ROOT

pytestmark = pytest.mark.usefixtures("own_threads")


@pytest.mark.parametrize("impls", [False, True])
def test_figures(
    impls: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(cpu_step, "READ_BYTES", 1 << 20)
    monkeypatch.setattr(cpu_step, "finish", lambda figures, ok: print(json.dumps(figures)))
    model = str(REPO_ROOT / "models" / "manta-small")
    words = ["--model", model, "--rounds", "1", "--rows", "1,3", *(["--impls"] if impls else [])]
    cpu_step.main(words)
    rows = json.loads(capsys.readouterr().out.splitlines()[-1])["rows"]
    assert [row["step"] for row in rows] == ["decode of 1", "decode of 3", "prefill of 4 x 512"]
    assert all(row["ratio"] > 0 for row in rows)
    if not impls:
        assert 0 < rows[0]["memory_ms"] < rows[1]["memory_ms"]
        assert {"linear", "attention", "logits"} <= rows[0]["parts_ms"].keys()
