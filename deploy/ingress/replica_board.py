"""`ReplicaBoard`: the places of the engine replicas, with what is known of the replica in each."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from deploy.http.engine_client import ReplicaState, ReplicaStatus
from deploy.ingress.engine_watch import EngineWatch
from deploy.serve_state.replica_states import EngineTarget, ServeStates, engine_target
from engine.errors import EngineDeadError

logger = logging.getLogger(__name__)

TIMEOUT_S = 0.8
"""A replica that hasn't answered after this time is silent."""
Report = Mapping[str, Any]
"""What `EngineReplica.report` returns."""


AskEngines = Callable[[str, float], Awaitable[list[Any]]]
"""Calls a method of every replica, with a time limit in seconds. Gives what they answer, errors
among it; raises `EngineDeadError` if one doesn't."""


class ReplicaBoard:
    """Remembers which replica has which place, from one look to the next. A replica that is lost
    keeps its place until another one takes it. Use from one event loop."""

    def __init__(self, ask: AskEngines, watch: EngineWatch, serve_states: ServeStates) -> None:
        self._ask = ask
        self._serve_states = serve_states
        self._watch = watch
        self._places = Places()

    async def look(self) -> tuple[int | None, list[ReplicaStatus]]:
        """How many replicas there should be (None: unknown), and the places. Never raises."""
        reports, target = await asyncio.gather(self._reports(), self._target())
        heard = {_replica_of(actor): fresh for actor, fresh in self._watch.actors.items()}
        # One silent replica hides the answers of all. Then the pings tell which one it is.
        alive = {name for name, fresh in heard.items() if fresh} if reports is None else set()
        places = self._places.update(reports or [], set(heard), alive, target)
        return (None if target is None else target.num_replicas), places

    async def _reports(self) -> list[Report] | None:
        """Of the replicas that can give one; None if a replica doesn't answer in time."""
        try:
            answers = await self._ask("report", TIMEOUT_S)
        except EngineDeadError as error:
            logger.debug("no reports: %s", error)
            return None
        return [answer for answer in answers if not isinstance(answer, BaseException)]

    async def _target(self) -> EngineTarget | None:
        try:
            told = await self._serve_states.ask(TIMEOUT_S)
            return engine_target(told, self._serve_states.engine)
        except Exception as error:  # any failure of the controller: it isn't known
            logger.debug("Serve doesn't tell what it wants: %s", type(error).__name__)
            return None


class Places:
    """The places alone, without asking anybody."""

    def __init__(self) -> None:
        self._names: list[str] = []
        """The replica of each place; "": none was there yet."""
        self._reports: dict[str, Report] = {}
        """The last report of each replica that has a place."""

    def update(
        self,
        reports: list[Report],
        known: set[str],
        alive: set[str],
        target: EngineTarget | None,
    ) -> list[ReplicaStatus]:
        """The places as of now. `known` are replicas that were heard some time ago, `alive` those
        that count as serving without a report."""
        fresh = {str(report["replica"]): report for report in reports}
        present = {**dict.fromkeys(sorted(alive & known)), **fresh}
        wanted = None if target is None else target.num_replicas
        self._reports |= fresh
        for name in present:
            self._take_place(name, present.keys(), wanted)
        self._names += sorted(known - set(self._names))
        self._trim(present.keys() | set(), wanted)
        self._reports = {n: r for n, r in self._reports.items() if n in self._names}
        states = {} if target is None else target.states
        return [
            self._status(place, name, name in present, name in fresh, states.get(name, ""))
            for place, name in enumerate(self._names, 1)
        ]

    def _take_place(self, name: str, present: Any, wanted: int | None) -> None:
        if name in self._names:
            return
        free = [i for i, other in enumerate(self._names) if other not in present]
        if free and wanted is not None and len(self._names) >= wanted:
            self._names[free[0]] = name
        else:
            self._names.append(name)

    def _trim(self, present: set[str], wanted: int | None) -> None:
        """Fill up to the wanted number, or drop replicas that are gone and not wanted any more."""
        if wanted is None:
            return
        for name in [n for n in self._names if n not in present]:
            if len(self._names) > wanted:
                self._names.remove(name)
        self._names += [""] * (wanted - len(self._names))

    def _status(
        self, place: int, name: str, is_present: bool, is_fresh: bool, serve_state: str
    ) -> ReplicaStatus:
        report = self._reports.get(name, {})
        wrong = str(report.get("wrong", ""))
        roles = [dict(role) for role in report.get("roles", ())]
        state: ReplicaState
        if not name:
            state, detail = "starting", "It hasn't been ready yet."
        elif not is_present:
            state, detail = "lost", wrong or "It doesn't answer."
            roles = [{**role, "wrong": role["wrong"] or "gone with its replica"} for role in roles]
        elif wrong and is_fresh:
            # A role that ended takes its replica with it.
            state, detail = ("lost" if report.get("has_ended") else "unwell"), wrong
        elif serve_state == "STOPPING":
            state, detail = "draining", "Serve is stopping it."
        else:
            state, detail = "serving", ""
        return {
            "place": place,
            "replica": name,
            "state": state,
            "detail": detail,
            "node": str(report.get("node", "")),
            "roles": roles,  # type: ignore[typeddict-item]
            "stats": report.get("stats") if is_present else None,
        }


def _replica_of(actor: str) -> str:
    """The replica's name in that of its actor, which is `SERVE_REPLICA::app#deployment#name`."""
    return actor.rpartition("#")[2]
