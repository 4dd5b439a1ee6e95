"""Ends a job: every process that was started for it and nothing else, in the reverse of the order they started in."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable
from contextlib import suppress

from deploy.backend import Backend
from deploy.unit import UnitRecord
from orchestrator.errors import HeadraceError
from orchestrator.spec.job import LaunchSpec
from orchestrator.store.home import StateUnusable
from orchestrator.store.jobs import JobStore, ended_event
from orchestrator.store.locks import DriverLock
from orchestrator.store.records import ENDED, Phase, RecordUnreadable, StoredJob
from orchestrator.supervisor.interfaces import LetRequestsEnd

DRIVER_LEAVES_S = 10.0
"""A driver sees the stop at its next look, after probes that take 2 seconds at most."""
SWEEP_GRACE_S = 2.0


class StopIncomplete(HeadraceError):
    """Some processes could not be ended, or nobody could write down that all were."""


def record_stop(store: JobStore, job: StoredJob, reason: str = "") -> None:
    """Write down that the job is to end, so that whoever is bringing it up starts nothing more.

    The reason of a stop that was begun and not finished is kept: it may be why the job failed.
    """
    kept = job.reason if job.phase == "stopping" else ""
    store.set_phase(job.name, job.run_id, "stopping", reason or kept, time.time())


def stop_job(
    store: JobStore,
    backend: Backend,
    name: str,
    *,
    end_phase: Phase = "stopped",
    reason: str = "",
    held: DriverLock | None = None,
    say: Callable[[str], None] = lambda _text: None,
    let_requests_end: LetRequestsEnd | None = None,
) -> StoredJob:
    """End the job; also after any crash, and again if need be. A run that has ended stays as it ended.

    The stop is recorded first; with `let_requests_end`, open requests finish where the record says so; then units are
    ended stage by stage, and what a crash left between a start and its record is found by the run's mark. Where the
    record can be read and not written, as on a full disk, all else is done. `held`: the job's lock, where the caller
    has it; it stays the caller's. Without it a driver is given time to leave, and then not waited for any longer.

    Raises:
        JobUnknown: no job is called so.
        StopIncomplete: processes are left, and the text names their pids; or all have ended, and the record is stale.
        StateUnusable: the record cannot be read.
    """
    job = store.get(name)
    if job.phase in ENDED and not _anything_left(backend, job):
        return job
    can_write = True
    try:
        record_stop(store, job, reason)
    except StateUnusable:
        can_write = False
    own = DriverLock(job.directory)
    if held is None:
        own.acquire(wait_s=DRIVER_LEAVES_S)
    try:
        now = store.get(name)
        if now.run_id == job.run_id:
            if let_requests_end is not None:
                _drain(store, now, let_requests_end, say)
            _end(store, backend, now, end_phase, say, can_write=can_write)
    finally:
        own.release()
    return store.get(name)


def _drain(store: JobStore, job: StoredJob, let_requests_end: LetRequestsEnd, say: Callable[[str], None]) -> None:
    def is_wanted() -> bool:
        head = store.head(job.name)
        return (
            head is not None
            and head.run_id == job.run_id
            and head.drain_until is not None
            and time.time() < head.drain_until
        )

    # One that another version planned is stopped at once.
    with suppress(RecordUnreadable):
        if is_wanted():
            say("letting open requests finish")
            let_requests_end(job.plan.router, is_wanted)


def _end(
    store: JobStore, backend: Backend, job: StoredJob, end_phase: Phase, say: Callable[[str], None], *, can_write: bool
) -> None:
    left = _end_units(store, backend, job, say, can_write=can_write)
    if left:
        listed = ", ".join(map(str, left))
        mend = f"look at them with `ps -fp {','.join(map(str, left))}`, then `headrace down {job.name}` again"
        told = f"these processes could not be ended: {listed}"
        with suppress(StateUnusable):
            record_stop(store, job, job.reason if told in job.reason else "; ".join(filter(None, (job.reason, told))))
        raise StopIncomplete(f"job {job.name!r}: these processes could not be ended: {listed}; {mend}")
    shutil.rmtree(job.socket_dir, ignore_errors=True)
    try:
        store.set_phase(job.name, job.run_id, end_phase, job.reason, time.time())
    except StateUnusable as error:
        told = f"all its processes have ended, and its record still says {job.phase!r}"
        raise StopIncomplete(f"job {job.name!r}: {told}: {error}; then `headrace down {job.name}` again") from error


def _end_units(
    store: JobStore, backend: Backend, job: StoredJob, say: Callable[[str], None], *, can_write: bool
) -> list[int]:
    """Pids that are left, sorted."""
    left: set[int] = set()
    before = backend.poll(job.run, job.records)
    for records, grace_s in _stages(job):
        say(f"stopping {', '.join(record.name for record in records)}")
        left.update(backend.stop(job.run, records, grace_s))
        after = backend.poll(job.run, records)
        for record in records:
            if can_write and before[record.name].alive and not after[record.name].alive:
                with suppress(StateUnusable):
                    store.events.note(job.name, ended_event(record, after[record.name].exit_code))
    left.update(backend.sweep(job.run, (), SWEEP_GRACE_S))
    return sorted(left)


def _stages(job: StoredJob) -> list[tuple[list[UnitRecord], float]]:
    """What is ended together, in order, and how long it may take; all at once where another version planned it."""
    try:
        units = job.plan.units
    except RecordUnreadable:
        return [([*job.records], LaunchSpec().stop_grace)] if job.records else []
    by_name = {record.name: record for record in job.records}
    planned = {unit.name for unit in units}
    surplus = [record for record in job.records if record.name not in planned]
    stages = [(surplus, job.plan.spec.launch.stop_grace)] if surplus else []
    for stage in sorted({unit.start_stage for unit in units}, reverse=True):
        started = [unit for unit in units if unit.start_stage == stage and unit.name in by_name]
        if started:
            stages.append(([by_name[unit.name] for unit in started], max(unit.stop_grace_s for unit in started)))
    return stages


def _anything_left(backend: Backend, job: StoredJob) -> bool:
    statuses = backend.poll(job.run, job.records)
    return any(status.alive or status.members for status in statuses.values())
