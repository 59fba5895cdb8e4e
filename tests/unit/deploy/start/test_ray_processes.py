"""`RayProcesses`: which processes a launch watches."""

from __future__ import annotations

import pytest

from deploy.start import ray_processes
from deploy.start.ray_processes import RayProcesses


def test_what_a_raylet_has_just_forked_is_not_taken_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """It has the raylet's command line until it becomes a worker, and may end at any time."""
    alive = {10, 11, 12}
    programs = {10: "raylet", 11: "raylet", 12: "gcs_server"}
    monkeypatch.setattr(ray_processes, "marked_processes", lambda mark: list(programs))
    monkeypatch.setattr(ray_processes, "_program", programs.__getitem__)
    monkeypatch.setattr(ray_processes, "_parent", {10: 1, 11: 10, 12: 1}.__getitem__)
    monkeypatch.setattr(ray_processes, "is_alive", alive.__contains__)
    processes = RayProcesses("mark")
    processes.find()
    alive.discard(11)
    assert processes.lost() == ""
    alive.discard(10)
    assert "raylet, process 10, has ended" in processes.lost()
