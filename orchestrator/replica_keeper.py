"""Keeps the processes of a running job at what is wanted of them, in `supervision.py`'s turns: restarts and drains that
somebody asked for, prefill engines that hand nothing over any more (A17), storage clients that are not mounted (A31).

Decides nothing: `replica_requests.py` and `supervisor/mounts.py` do. What takes long runs beside the turns.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Protocol

from orchestrator.observe.outside import Outside
from orchestrator.plan.kinds import kinds_of
from orchestrator.plan.types import EnginePlan, JobPlan
from orchestrator.replica_requests import (
    End,
    EngineLife,
    Refuse,
    RequestSight,
    next_act,
    poisoned,
    refusal,
    withdrawn,
)
from orchestrator.store.jobs import StoredJob
from orchestrator.store.keeping import KeepingStore, ReplicaRequest, drained, life_of
from orchestrator.supervisor.mounts import Mounts, unmounted
from orchestrator.supervisor.watch import Watch

LOOK_EVERY_S = 1.0


class LetHandoffsEnd(Protocol):
    def __call__(self, engine: EnginePlan, limit_s: float) -> None: ...


class ReplicaKeeper:
    """Of one run of a job."""

    def __init__(
        self,
        *,
        keeping: KeepingStore,
        watch: Watch,
        job: StoredJob,
        look_outside: Callable[[JobPlan], Outside],
        let_handoffs_end: LetHandoffsEnd,
    ) -> None:
        self._keeping, self._watch, self._job = keeping, watch, job
        self._look_outside, self._let_handoffs_end = look_outside, let_handoffs_end
        self._kinds = kinds_of(job.plan)
        self._engines = {engine.name: engine for engine in job.plan.engines}
        self._requests = keeping.requests(job.name)
        self._outside: Outside | None = None
        """Before the first look has come back."""
        self._looking: threading.Thread | None = None
        self._look_at = 0.0
        self._mounts = Mounts()
        self._settling: dict[str, threading.Thread] = {}
        """By the life that settles."""

    def withdrawn(self) -> frozenset[str]:
        """Engines that are to get no requests now."""
        lives = {name: life_of(stored.record) for name, stored in self._watch.units.items()}
        engines = frozenset(self._engines)
        return withdrawn(self._requests, lives) & engines

    def turn(self, *, is_updating: bool) -> None:
        """After each look of the watch."""
        if self._look() and self._outside is not None:
            self._remount(self._outside)
            self._doubt_prefills(self._outside)
        # One at a time: what each leaves behind is known before the next is begun.
        asked = next((each for each in self._keeping.requests(self._job.name) if each.outcome is None), None)
        if asked is not None and self._outside is not None:
            self._carry_on(asked, self._outside, is_updating=is_updating)
        self._requests = self._keeping.requests(self._job.name)

    def _look(self) -> bool:
        """Whether there is something new from outside."""
        now = time.monotonic()
        if self._looking is not None:
            if self._looking.is_alive():
                return False
            self._looking = None
            return True
        if now >= self._look_at:
            self._look_at = now + LOOK_EVERY_S
            self._looking = threading.Thread(target=self._take_look, name="look outside", daemon=True)
            self._looking.start()
        return False

    def _take_look(self) -> None:
        self._outside = self._look_outside(self._job.plan)

    def _remount(self, outside: Outside) -> None:
        pool, segments = self._job.plan.pool, outside.segments
        if pool is None or segments is None:
            return
        missed = {name for name in unmounted(pool.clients, segments) if self._watch.states.get(name) == "ready"}
        for name in self._mounts.overdue(missed, time.monotonic()):
            self._watch.restart(name, "the master does not count its memory")

    def _doubt_prefills(self, outside: Outside) -> None:
        lives = {
            name: EngineLife(
                role=engine.role,
                started_at=self._watch.units[name].started_at,
                ready_at=self._watch.units[name].ready_at,
            )
            for name, engine in self._engines.items()
            if name in self._watch.units
        }
        open_now = {request.unit for request in self._requests if request.outcome is None}
        for name, why in poisoned(lives, outside.replicas or {}).items():
            if name not in open_now and name not in self._watch.given_up:
                # Forced: without it nothing is lost, since nobody can use what it hands over.
                self._keeping.ask(
                    self._job.name,
                    self._job.run_id,
                    "restart",
                    self._watch.units[name].record,
                    why=why,
                    is_forced=True,
                    now=time.time(),
                )

    def _carry_on(self, request: ReplicaRequest, outside: Outside, *, is_updating: bool) -> None:
        job, now = self._job.name, time.time()
        sight = self._sight(request, outside, is_updating=is_updating)
        match next_act(sight, now):
            case "begin":
                self._keeping.begin(job, request.number, now)
            case "settle":
                self._settle(self._engines[request.unit], sight.life)
            case "replace":
                self._watch.replace(request.unit, request.life)
            case Refuse(why=why):
                self._keeping.end(job, request, "refused", why, now)
            case End(outcome=outcome, note=note):
                self._keeping.end(job, request, outcome, note, now)

    def _sight(self, request: ReplicaRequest, outside: Outside, *, is_updating: bool) -> RequestSight:
        unit, replicas = request.unit, outside.replicas
        kind, engine = self._kinds[unit], self._engines.get(unit)
        life = life_of(self._watch.units[unit].record)
        gone = drained(self._requests)
        fleet = {name: each.role for name, each in self._engines.items()}
        may_leave = request.kind == "undrain"
        settling = self._settling.get(life)
        return RequestSight(
            request=request,
            kind=kind,
            role=None if engine is None else engine.role,
            refusal="" if may_leave else refusal(unit, kind, fleet, replicas, gone),
            life=life,
            state=self._watch.states[unit],
            given_up=self._watch.given_up.get(unit),
            replica=None if replicas is None else replicas.get(unit),
            is_settled=settling is not None and not settling.is_alive(),
            is_drained=unit in gone,
            is_updating=is_updating,
            drain_s=self._job.plan.weights.limits.drain_s,
        )

    def _settle(self, engine: EnginePlan, life: str) -> None:
        if life not in self._settling:
            limit_s = self._job.plan.weights.limits.pause_s
            thread = threading.Thread(target=self._let_handoffs_end, args=(engine, limit_s), daemon=True)
            self._settling[life] = thread
            thread.start()
