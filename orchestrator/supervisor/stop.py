"""Ends a job: every process that was started for it and nothing else, in the reverse of the order they started in."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable

from deploy.backend import Backend
from orchestrator.errors import HeadraceError
from orchestrator.store.driver_lock import DriverLock
from orchestrator.store.jobs import ENDED, JobStore, Phase, StoredJob

DRIVER_LEAVES_S = 10.0
"""A driver sees the stop at its next look, after probes that take 2 seconds at most."""
SWEEP_GRACE_S = 2.0


class StopIncomplete(HeadraceError):
    """Some processes could not be ended."""


def stop_job(
    store: JobStore,
    backend: Backend,
    name: str,
    *,
    end_phase: Phase = "stopped",
    reason: str = "",
    say: Callable[[str], None] = lambda _text: None,
) -> StoredJob:
    """End the job; also after any crash, and again if need be.

    The stop is recorded first, so that whoever is bringing the job up starts nothing more; then units are ended stage
    by stage, and what a crash left between a start and its record is found by the run's mark.

    Raises:
        JobUnknown: no job is called so.
        StopIncomplete: processes are left; the text names their pids.
    """
    job = store.get(name)
    if job.phase in ENDED and not _anything_left(backend, job):
        return job
    store.set_phase(name, job.run_id, "stopping", reason, time.time())
    lock = DriverLock(job.directory)
    lock.acquire(wait_s=DRIVER_LEAVES_S)
    try:
        job = store.get(name)
        left = _end_units(backend, job, say)
        if left:
            pids = ", ".join(map(str, left))
            raise StopIncomplete(
                f"job {name!r}: these processes could not be ended: {pids}; look at them with ps -fp {pids}"
            )
        shutil.rmtree(job.socket_dir, ignore_errors=True)
        store.set_phase(name, job.run_id, end_phase, reason, time.time())
    finally:
        lock.release()
    return store.get(name)


def _end_units(backend: Backend, job: StoredJob, say: Callable[[str], None]) -> tuple[int, ...]:
    left: list[int] = []
    by_name = {record.name: record for record in job.records}
    for stage in sorted({unit.start_stage for unit in job.plan.units}, reverse=True):
        units = [unit for unit in job.plan.units if unit.start_stage == stage and unit.name in by_name]
        if units:
            say(f"stopping {', '.join(unit.name for unit in units)}")
            grace_s = max(unit.stop_grace_s for unit in units)
            left += backend.stop(job.run, [by_name[unit.name] for unit in units], grace_s)
    left += backend.sweep(job.run, (), SWEEP_GRACE_S)
    return tuple(left)


def _anything_left(backend: Backend, job: StoredJob) -> bool:
    statuses = backend.poll(job.run, job.records)
    return any(status.alive or status.members for status in statuses.values())
