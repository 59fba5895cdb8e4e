"""Places: a lost replica keeps its own until another one takes it."""

from __future__ import annotations

from typing import Any

from deploy.http.engine_client import ReplicaStatus
from deploy.ingress.replica_board import Places
from deploy.serve_state.replica_states import EngineTarget


def report(name: str, wrong: str = "", has_ended: bool = False) -> dict[str, Any]:
    roles = [{"role": "worker 0", "pid": 1, "wrong": "ended" if has_ended else ""}]
    about = {"replica": name, "node": "n", "wrong": wrong, "has_ended": has_ended}
    return {**about, "roles": roles, "stats": {"x": 1}}


def look(places: Places, *reports: dict[str, Any], want: int = 2, **states: str) -> Any:
    found = places.update(list(reports), set(), set(), EngineTarget(want, states))
    return [(status["place"], status["replica"], status["state"]) for status in found]


def test_a_lost_replica_keeps_its_place_until_another_takes_it() -> None:
    places = Places()
    assert look(places, report("a"), report("b")) == [(1, "a", "serving"), (2, "b", "serving")]
    assert look(places, report("b")) == [(1, "a", "lost"), (2, "b", "serving")]
    assert look(places, report("b")) == [(1, "a", "lost"), (2, "b", "serving")]
    assert look(places, report("b"), report("c")) == [(1, "c", "serving"), (2, "b", "serving")]


def test_a_replica_that_says_that_a_role_ended_is_lost() -> None:
    places = Places()
    look(places, report("a"), report("b"))
    ended = report("a", "worker 0 ended: killed", has_ended=True)
    assert look(places, ended, report("b"))[0][2] == "lost"
    assert look(places, report("a", "worker 0 hasn't answered for 2 s"), report("b"))[0][2] == (
        "unwell"
    )


def test_what_isnt_wanted_any_more_goes() -> None:
    places = Places()
    look(places, report("a"), report("b"))
    assert look(places, report("b"), want=1) == [(1, "b", "serving")]
    assert look(places, report("b"), want=2) == [(1, "b", "serving"), (2, "", "starting")]
    assert look(places, report("b"), want=1, b="STOPPING") == [(1, "b", "draining")]


def test_pings_tell_who_lives_while_one_replica_hides_the_reports() -> None:
    places = Places()
    look(places, report("a"), report("b"))
    found: list[ReplicaStatus] = places.update([], {"a", "b"}, {"b"}, EngineTarget(2, {}))
    assert [(s["replica"], s["state"]) for s in found] == [("a", "lost"), ("b", "serving")]
    assert found[0]["roles"][0]["wrong"] == "gone with its replica"
    assert found[0]["stats"] is None and found[1]["stats"] == {"x": 1}
