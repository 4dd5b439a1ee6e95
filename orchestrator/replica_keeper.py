"""Keeps the processes of a running job at what is wanted of them, in `supervision.py`'s turns: restarts and drains that
somebody asked for, another number of replicas, prefill engines that hand nothing over any more (A17), storage clients
that are not mounted (A31).

Decides nothing: `replica_requests.py`, `scale_requests.py` and `supervisor/mounts.py` do. What takes long runs beside
the turns.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from typing import Protocol

from deploy.errors import DeployError
from deploy.unit import PlannedFile
from orchestrator.background import in_background
from orchestrator.errors import RequestRefused
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
from orchestrator.scale_requests import ReplicaSight, ScaleSight, Settle, next_scale_act
from orchestrator.store.jobs import JobStore, PortsReserved
from orchestrator.store.keeping import KeepingStore, ReplicaRequest, drained, is_beyond, life_of
from orchestrator.store.records import StoredJob
from orchestrator.supervisor.mounts import Mounts, unmounted
from orchestrator.supervisor.watch import Watch
from router.core.fleet import ReplicaView

LOOK_EVERY_S = 1.0


class LetHandoffsEnd(Protocol):
    def __call__(self, engine: EnginePlan, limit_s: float) -> None: ...


class ReplicaKeeper:
    """Of one run of a job, by one plan of it."""

    def __init__(
        self,
        *,
        store: JobStore,
        keeping: KeepingStore,
        watch: Watch,
        job: StoredJob,
        write_files: Callable[[Sequence[PlannedFile]], None],
        look_outside: Callable[[JobPlan], Outside],
        let_handoffs_end: LetHandoffsEnd,
    ) -> None:
        self._store, self._keeping, self._watch, self._job = store, keeping, watch, job
        self._write_files, self._look_outside, self._let_handoffs_end = write_files, look_outside, let_handoffs_end
        self.has_replanned = False
        """The job goes by another plan: this keeper's time is over."""
        self._kinds = kinds_of(job.plan)
        self._engines = {engine.name: engine for engine in job.plan.engines}
        self._requests = keeping.requests(job.name)
        self._began_at = time.time()
        self._outside: Outside | None = None
        """Before the first look has come back."""
        self._looking: Future[Outside] | None = None
        self._look_at = 0.0
        self._mounts = Mounts()
        self._settling: dict[str, Future[None]] = {}
        """By the life that settles."""

    def withdrawn(self) -> frozenset[str]:
        """Engines that are to get no requests now."""
        lives = {name: life_of(stored.record) for name, stored in self._watch.units.items()}
        engines = frozenset(self._engines)
        scaling = [each for each in self._requests if each.kind == "scale" and each.begun_at and each.outcome is None]
        leaving = {name for name in engines for scale in scaling if is_beyond(name, scale)}
        return (withdrawn(self._requests, lives) | leaving) & engines

    def turn(self, *, is_updating: bool, is_moving: bool) -> None:
        """After each look of the watch. `is_moving`: weights are updated, purged, or brought to engines that join."""
        self._requests = self._keeping.requests(self._job.name)
        if self._look() and self._outside is not None:
            self._remount(self._outside)
            self._doubt_prefills(self._outside)
        # One at a time: what each leaves behind is known before the next is begun.
        asked = next((each for each in self._requests if each.outcome is None), None)
        if asked is not None and self._outside is not None:
            if asked.kind == "scale":
                self._scale_on(asked, self._outside, is_moving=is_moving)
            elif asked.unit not in self._kinds:
                self._keeping.end(self._job.name, asked, "refused", "it was removed", time.time())
            elif asked.unit in self._watch.units:
                self._carry_on(asked, self._outside, is_updating=is_updating)
            self._requests = self._keeping.requests(self._job.name)

    def _look(self) -> bool:
        """Whether there is something new from outside."""
        now = time.monotonic()
        if self._looking is not None:
            if not self._looking.done():
                return False
            # A look that failed has seen nobody answer.
            failed = self._looking.exception() is not None
            self._outside = Outside(replicas=None, segments=None) if failed else self._looking.result()
            self._looking = None
            return True
        if now >= self._look_at:
            self._look_at = now + LOOK_EVERY_S
            look = partial(self._look_outside, self._job.plan)
            self._looking = in_background(look, f"{self._job.name}: look at router and master")
        return False

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
                # Forced: without it nothing is lost, since nobody can use what it hands over. Refused: somebody has
                # asked for something else of it since the last turn.
                with suppress(RequestRefused):
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
        may_leave = request.kind == "undrain"
        settling = self._settling.get(life)
        return RequestSight(
            request=request,
            kind=kind,
            role=None if engine is None else engine.role,
            refusal="" if may_leave else refusal(unit, kind, self._job.plan.fleet, replicas, gone),
            life=life,
            state=self._watch.states[unit],
            given_up=self._watch.given_up.get(unit),
            replica=None if replicas is None else replicas.get(unit),
            is_settled=settling is not None and settling.done(),
            is_drained=unit in gone,
            is_updating=is_updating,
            drain_s=self._job.plan.weights.limits.drain_s,
            since=self._since(request),
            serves_within_s=self._serves_within_s([unit]),
        )

    def _since(self, request: ReplicaRequest) -> float:
        return max(self._began_at, request.begun_at or request.asked_at)

    def _serves_within_s(self, names: Sequence[str]) -> float:
        """Until requests and handoffs have ended, and another life is ready and has its weights."""
        limits = self._job.plan.weights.limits
        ready_s = max(unit.ready_timeout_s for unit in self._job.plan.units if unit.name in names)
        return limits.drain_s + limits.pause_s + ready_s + limits.load_s

    def _scale_on(self, request: ReplicaRequest, outside: Outside, *, is_moving: bool) -> None:
        job, now = self._job.name, time.time()
        match next_scale_act(self._scale_sight(request, outside, is_moving=is_moving), now):
            case "begin":
                self._keeping.begin(job, request.number, now)
            case Settle(names=names):
                for name in names:
                    self._settle(self._engines[name], life_of(self._watch.units[name].record))
            case "plan":
                self._replan(request, now)
            case Refuse(why=why):
                self._keeping.end(job, request, "refused", why, now)
            case End(outcome=outcome, note=note):
                self._keeping.end(job, request, outcome, note, now)

    def _replan(self, request: ReplicaRequest, now: float) -> None:
        plan = self._keeping.plan_of(self._job.name, request.number)
        try:
            # A router that starts again reads them, and Prometheus does so by itself. Written again, they are the same.
            self._write_files(plan.files)
            self._store.replan(self._job.run_id, plan, now)
        except (DeployError, PortsReserved) as error:
            with suppress(DeployError):
                self._write_files(self._job.plan.files)
            self._keeping.end(self._job.name, request, "failed", f"{error}; nothing has changed, ask again", now)
        else:
            self.has_replanned = True

    def _scale_sight(self, request: ReplicaRequest, outside: Outside, *, is_moving: bool) -> ScaleSight:
        role, replicas, gone = request.unit, outside.replicas, drained(self._requests)
        names = [name for name, engine in self._engines.items() if engine.role == role]
        leaving = [name for name in names if is_beyond(name, request)]
        fleet = self._job.plan.fleet
        refusals = (refusal(name, "engine", fleet, replicas, gone.union(leaving)) for name in leaving)
        return ScaleSight(
            request=request,
            refusal=next(filter(None, refusals), ""),
            is_moving=is_moving,
            is_planned=len(names) == request.replicas,
            leaving=[self._replica_sight(name, request, replicas) for name in leaving],
            staying=[self._replica_sight(name, request, replicas) for name in names if name not in leaving],
            has_surplus=bool(self._watch.surplus),
            unended=self._watch.unended if self._watch.surplus else "",
            drain_s=self._job.plan.weights.limits.drain_s,
            since=self._since(request),
            serves_within_s=self._serves_within_s(names),
        )

    def _replica_sight(
        self, name: str, request: ReplicaRequest, replicas: Mapping[str, ReplicaView] | None
    ) -> ReplicaSight:
        stored = self._watch.units.get(name)
        settling = None if stored is None else self._settling.get(life_of(stored.record))
        began = request.begun_at or request.asked_at
        return ReplicaSight(
            name=name,
            role=self._engines[name].role,
            state=self._watch.states[name],
            given_up=self._watch.given_up.get(name),
            replica=None if replicas is None else replicas.get(name),
            is_settled=settling is not None and settling.done(),
            is_drained=name in drained(self._requests),
            is_new=stored is None or stored.started_at >= began,
        )

    def _settle(self, engine: EnginePlan, life: str) -> None:
        if life not in self._settling:
            settle = partial(self._let_handoffs_end, engine, self._job.plan.weights.limits.pause_s)
            self._settling[life] = in_background(settle, f"{self._job.name}: settle {engine.name}")
