"""A recorded job as it really is: the record's phase, corrected by what is seen of its processes now."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass

from connectors.pool_client import PoolUse
from deploy.backend import Backend
from deploy.probe import ProbeResult
from deploy.unit import LaunchUnit, UnitRecord
from orchestrator.store.events import StoredEvent
from orchestrator.store.jobs import JobStore
from orchestrator.store.locks import DriverLock
from orchestrator.store.records import ENDED, JobHead, Phase, StoredJob
from orchestrator.supervisor.interfaces import ReadinessProbe
from orchestrator.supervisor.probing import probe_units
from orchestrator.supervisor.state import UnitState

MOVING: tuple[Phase, ...] = ("starting", "stopping")
"""Phases in which a process works on the job."""
DRIVER_LOOKS = 3
DRIVER_LOOK_EVERY_S = 0.1
DRIVER_COMES_S = 1.0


@dataclass(frozen=True, kw_only=True)
class UnitView:
    name: str
    node: str
    state: UnitState
    pid: int | None
    seconds: float
    """Time to ready, or age while it is not."""
    detail: str
    log: str


@dataclass(frozen=True, kw_only=True)
class ServedVersion:
    version: str
    epoch: int


@dataclass(frozen=True, kw_only=True)
class JobView:
    job: StoredJob
    phase: Phase
    reason: str
    units: tuple[UnitView, ...]
    serves: ServedVersion | None = None
    """The weights that requests are answered with; None before the job has come up."""
    events: tuple[StoredEvent, ...] = ()
    """The newest few, in their order."""
    now_doing: str = ""
    """What a start that is driven from here awaits."""
    pool_use: PoolUse | str = ""
    """What the pool's master says; else why it was not asked, or did not answer."""


@dataclass(frozen=True, kw_only=True)
class JobGlance:
    job: JobHead
    phase: Phase
    reason: str
    alive: frozenset[UnitRecord]


def view_job(store: JobStore, name: str, backend: Backend, probe: ReadinessProbe) -> JobView:
    """Look at every process of the job now.

    Raises:
        JobUnknown: none is recorded.
    """
    job, driven = _read(store, name)
    units = look_at_units(job, backend, probe)
    if store.get(name).phase_at != job.phase_at:
        # It moved on between the record and the look, so the two do not belong together.
        job, driven = _read(store, name)
        units = look_at_units(job, backend, probe)
    phase, reason = true_phase(job.phase, job.reason, {unit.name: unit.state for unit in units}, driven=driven)
    return JobView(job=job, phase=phase, reason=reason, units=units)


def glance_at_jobs(store: JobStore, backend: Backend) -> list[JobGlance]:
    """At all jobs: whether their processes live, and not whether they answer."""
    heads = store.heads()
    alive = backend.alive([record for head in heads if head.phase not in ENDED for record in head.records])
    return [_glance(head, alive) for head in heads]


def _glance(head: JobHead, alive: frozenset[UnitRecord]) -> JobGlance:
    states: dict[str, UnitState] = {record.name: "ready" if record in alive else "dead" for record in head.records}
    phase, reason = true_phase(head.phase, head.reason, states, driven=is_driven(head))
    return JobGlance(job=head, phase=phase, reason=reason, alive=alive.intersection(head.records))


def is_driven(head: JobHead) -> bool:
    """Whether a process is bringing the job up or ending it. One that is just coming is given a moment."""
    is_new = time.time() - head.phase_at < DRIVER_COMES_S
    return head.phase in MOVING and (is_new or DriverLock(head.directory).held_by_anyone())


def true_phase(recorded: Phase, reason: str, states: Mapping[str, UnitState], *, driven: bool) -> tuple[Phase, str]:
    """What the record says, unless what is seen contradicts it. `driven`: a process is bringing it up or ending it."""
    if recorded in ENDED:
        return recorded, reason
    if recorded in MOVING and not driven:
        gone = f"whoever was {recorded} it is gone; `headrace down` ends what is left"
        return "abandoned", _joined(reason, gone)
    if recorded == "stopping":
        return recorded, reason
    dead = [name for name, state in states.items() if state == "dead"]
    silent = [name for name, state in states.items() if state == "starting"]
    if recorded == "starting":
        # Whoever brings it up sees the same, and says what becomes of it.
        return recorded, _joined(reason, f"not running: {', '.join(dead)}" if dead else "")
    if dead and len(dead) == len(states):
        return "failed", "no process of the job is alive"
    if dead:
        return "degraded", _joined(reason, f"not running: {', '.join(dead)}")
    if silent:
        return "degraded", _joined(reason, f"not answering: {', '.join(silent)}")
    return recorded, reason


def _joined(*reasons: str) -> str:
    return "; ".join(reason for reason in reasons if reason)


def _read(store: JobStore, name: str) -> tuple[StoredJob, bool]:
    """The record, and whether a process is moving the job on; one that is just coming or going is given a moment."""
    job = store.get(name)
    for _ in range(DRIVER_LOOKS):
        if job.phase not in MOVING:
            return job, False
        if DriverLock(job.directory).held_by_anyone():
            return job, True
        time.sleep(DRIVER_LOOK_EVERY_S)
        job = store.get(name)
    return job, False


def look_at_units(job: StoredJob, backend: Backend, probe: ReadinessProbe) -> tuple[UnitView, ...]:
    """Every process of the job: by pid and start, and by its probe where it lives."""
    statuses = backend.poll(job.run, job.records)
    living = [unit for unit in job.plan.units if unit.name in statuses and statuses[unit.name].alive]
    results = probe_units(living, statuses, probe)
    return tuple(_unit_view(unit, job, results) for unit in job.plan.units)


def _unit_view(unit: LaunchUnit, job: StoredJob, results: Mapping[str, ProbeResult]) -> UnitView:
    stored = next((stored for stored in job.units if stored.record.name == unit.name), None)
    if stored is None:
        return UnitView(name=unit.name, node=unit.node, state="waiting", pid=None, seconds=0.0, detail="", log="")
    result = results.get(unit.name)
    state: UnitState = "dead" if result is None else "ready" if result.ready else "starting"
    return UnitView(
        name=unit.name,
        node=unit.node,
        state=state,
        pid=stored.record.pid,
        seconds=max(0.0, (stored.ready_at if stored.ready_at is not None else time.time()) - stored.started_at),
        detail=result.detail if result is not None else "",
        log=str(stored.record.log),
    )
