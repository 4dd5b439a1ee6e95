"""Keeps a job whose processes are up: its processes (`supervisor/watch.py`, `replica_keeper.py`) and its weights
(`weights/runner.py`).

There is one way to become routable: the coordinator of weights brings an engine to the committed version and epoch,
tells the router, and opens the gate. `open` does so at the end of a start, `keep` afterwards: for engines that were
restarted, for another life of the router, and for updates that somebody asks for. One process at a time, by a lock; a
job serves on without any. `all_jobs.py` keeps every job that serves.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal, Protocol

from deploy.backend import Backend
from orchestrator.errors import JobFailed, UpdateRefused
from orchestrator.observe.engines import PROBE_EPOCH
from orchestrator.observe.outside import Outside
from orchestrator.plan.kinds import UnitKind, kinds_of
from orchestrator.plan.types import JobPlan, RouterPlan
from orchestrator.plan.weights import WeightsPlan
from orchestrator.replica_keeper import LetHandoffsEnd, ReplicaKeeper
from orchestrator.store.jobs import JobStore
from orchestrator.store.keeping import KeepingStore
from orchestrator.store.locks import CoordinatorLock
from orchestrator.store.records import StoredJob
from orchestrator.store.updates import UpdateStore
from orchestrator.supervisor.adoption import note_adoption
from orchestrator.supervisor.interfaces import ReadinessProbe
from orchestrator.supervisor.restarts import job_failure
from orchestrator.supervisor.stop import stop_job
from orchestrator.supervisor.watch import UnitNews, Watch
from orchestrator.weights.acts import Command
from orchestrator.weights.events import (
    Cancelled,
    EngineAwaited,
    EngineCameUp,
    EngineEnded,
    Event,
    RouterCameUp,
    UpdateAsked,
    Withdrawn,
)
from orchestrator.weights.groups import has_pair
from orchestrator.weights.journal import Journal, PushRecord, position_of
from orchestrator.weights.machine import Coordinator
from orchestrator.weights.receivers import FIRST_VERSION
from orchestrator.weights.runner import Runner
from orchestrator.weights.words import BY_REQUEST, Position, Update, first_position

FIRST_EPOCH = 1
OPENS_WITHIN_S = 120.0
"""After the engines have joined: a router believes no engine before it has probed it itself."""
LOOK_EVERY_S = 0.5
LOCK_WAIT_S = 5.0
"""Whoever supervised an earlier run of the job leaves within this."""

_log = logging.getLogger(__name__)


class NotReady(Protocol):
    def __call__(self, router: RouterPlan) -> str | None:
        """Why the router does not serve yet; None once it does."""
        ...


@dataclass(frozen=True, kw_only=True)
class Supervision:
    """Of any job; calls block."""

    store: JobStore
    updates: UpdateStore
    backend: Callable[[], Backend]
    probe: ReadinessProbe
    carry_out: Callable[[JobPlan], Callable[[Command], Event]]
    not_ready: NotReady
    keeping: KeepingStore
    look_outside: Callable[[JobPlan], Outside]
    let_handoffs_end: LetHandoffsEnd
    look_every_s: float = LOOK_EVERY_S

    def open(self, job: StoredJob) -> None:
        """Make the engines of a job that has just come up routable, and open its gate.

        Raises:
            JobFailed: an engine or the router does not do its part.
        """
        with _locked(job, LOCK_WAIT_S) as held:
            if not held:
                raise JobFailed(f"job {job.name!r} is supervised by another process")
            runner = self._runner(job, Journal(self.updates, job.name, job.run_id), _fail_start)
            deadline = time.monotonic() + job.plan.weights.limits.pause_s + OPENS_WITHIN_S
            while reason := _unopened(runner.position, self.not_ready, job.plan.router):
                if time.monotonic() > deadline:
                    raise JobFailed(f"the router did not open its gate: {reason}")
                runner.turn(self.look_every_s)

    def keep(self, name: str, is_over: Callable[[Position], bool]) -> bool:
        """Supervise a job until `is_over`, or until it no longer serves. False: another process does it.

        Raises:
            JobUnknown, CoordinatorReplaced, StateUnusable: another call goes on where this one was.
            RecordUnreadable: another version recorded the job.
            StopIncomplete: the job has failed, and processes of it are left; the text names their pids.
        """
        job = self.store.get(name)
        with _locked(job, 0.0) as held:
            if not held:
                return False
            position = position_of(self.updates, job.name)
            note_adoption(self.store, self.backend(), self.probe, job, _doing(position))
            # Whoever goes by another plan knows nothing of the plan before.
            while self._keep_as_planned(self.store.get(name), is_over) == "replanned":
                pass
            return True

    def _keep_as_planned(self, job: StoredJob, is_over: Callable[[Position], bool]) -> Literal["over", "replanned"]:
        watch = Watch(store=self.store, keeping=self.keeping, backend=self.backend(), probe=self.probe, job=job)
        keeper = ReplicaKeeper(
            store=self.store,
            keeping=self.keeping,
            watch=watch,
            job=job,
            write_files=partial(self.backend().prepare, job.run, ()),
            look_outside=self.look_outside,
            let_handoffs_end=self.let_handoffs_end,
        )
        journal = Journal(self.updates, job.name, job.run_id)
        runner = self._runner(job, journal, watch.restart)
        while self.store.is_serving(job.name, job.run_id) and not is_over(runner.position):
            self._look(job, watch, keeper, runner)
            if keeper.has_replanned:
                return "replanned"
            _take_asked(runner, journal, job.plan)
            next_look = time.monotonic() + self.look_every_s
            while (left_s := next_look - time.monotonic()) > 0:
                runner.turn(left_s)
        return "over"

    def _look(self, job: StoredJob, watch: Watch, keeper: ReplicaKeeper, runner: Runner) -> None:
        """At its processes, and what is to be done about them."""
        news = [*watch.look()]
        keeper.turn(is_updating=_is_updating(runner.position), is_moving=runner.position.course is not None)
        # First of all: whoever is withdrawn is not to join again.
        runner.take(Withdrawn(names=keeper.withdrawn()))
        kinds = kinds_of(job.plan)
        for each in news:
            _tell(runner, kinds[each.unit], each)
        fleet = job.plan.fleet
        can_serve = has_pair((name for name in fleet if name not in watch.given_up), fleet)
        reason = job_failure(kinds, watch.given_up, can_serve=can_serve)
        if reason:
            _log.error("%s has failed: %s", job.name, reason)
            stop_job(self.store, self.backend(), job.name, end_phase="failed", reason=reason)

    def _runner(self, job: StoredJob, journal: Journal, restart: Callable[[str, str], None]) -> Runner:
        weights = job.plan.weights
        coordinator = Coordinator(
            fleet=job.plan.fleet,
            wipes_pool=job.plan.wipes_pool,
            position=journal.newest() or _first_position(weights),
            join_limits=weights.limits,
            join_mode=weights.load_mode,
        )
        return Runner(coordinator=coordinator, journal=journal, carry_out=self.carry_out(job.plan), restart=restart)


def _doing(position: Position | None) -> str:
    course = None if position is None else position.course
    if course is None:
        return "supervised"
    return f"supervised, update {course.update.number} goes on in {course.phase} ({course.going}),"


@contextmanager
def _locked(job: StoredJob, wait_s: float) -> Iterator[bool]:
    """Whether the job's coordinator lock was had."""
    lock = CoordinatorLock(job.directory)
    try:
        yield lock.acquire(wait_s=wait_s)
    finally:
        lock.release()


def _first_position(weights: WeightsPlan) -> Position:
    """Of a job that was never supervised. What the offload probe left in the pool goes with the first purge."""
    source = {"transport": "path", "version": FIRST_VERSION, "path": weights.location}
    first = first_position(FIRST_EPOCH, FIRST_VERSION, source)
    return replace(first, epochs={PROBE_EPOCH: FIRST_VERSION, **first.epochs})


def _unopened(position: Position, not_ready: NotReady, router: RouterPlan) -> str | None:
    """Why a job does not serve yet; None once all its engines have joined and its router answers so."""
    return f"engines are in {position.course.phase}" if position.course is not None else not_ready(router)


def _fail_start(name: str, why: str) -> None:
    raise JobFailed(f"{name} did not join: {why}")


def _is_updating(position: Position) -> bool:
    return position.course is not None and position.course.going != "join" and position.course.phase != "purge"


def _tell(runner: Runner, kind: UnitKind, news: UnitNews) -> None:
    match kind, news.what:
        case "router", "ready":
            runner.take(RouterCameUp())
        case "engine", "awaited":
            runner.take(EngineAwaited(name=news.unit))
        case "engine", "ended":
            runner.take(EngineEnded(name=news.unit))
        case "engine", "ready":
            runner.take(EngineCameUp(name=news.unit))


def _take_asked(runner: Runner, journal: Journal, plan: JobPlan) -> None:
    """Begin or cancel the update that somebody has asked for, if any."""
    record = journal.unended()
    if record is None:
        return
    is_begun = record.number <= runner.position.last_update
    if is_begun and record.is_cancelled:
        runner.take(Cancelled(update=record.number))
    elif record.is_cancelled:
        journal.end_unbegun(record.number, "cancelled", BY_REQUEST)
    elif not is_begun:
        try:
            runner.take(UpdateAsked(update=_update(record, plan)))
        except UpdateRefused as refused:
            journal.end_unbegun(record.number, "refused", str(refused))


def _update(record: PushRecord, plan: JobPlan) -> Update:
    push = record.push
    return Update(
        number=record.number,
        version=push.version,
        source=push.source,
        strategy=push.strategy,
        in_flight=push.in_flight,
        load_mode=push.load_mode,
        limits=plan.weights.limits,
    )
