"""What the CLI and the control API both stand on: plan, start, look at and stop jobs.

It orders the steps; what each step is lies in `plan/`, `supervisor/`, `store/` and the launch backend, and `compose.py`
chooses the implementations.
"""

from __future__ import annotations

import os
import secrets
import shutil
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from deploy.backend import Backend
from deploy.errors import DeployError
from orchestrator.errors import JobExists, JobFailed, Unsupported
from orchestrator.plan.build import build_plan, refuse_errors
from orchestrator.plan.facts import ClusterFacts
from orchestrator.plan.types import JobPlan
from orchestrator.spec.job import JobSpec
from orchestrator.store.driver_lock import DriverLock
from orchestrator.store.jobs import JobStore, StoredJob
from orchestrator.supervisor.interfaces import EngineQuestions, Gate, ProgressSink, ReadinessProbe
from orchestrator.supervisor.loop import Overtaken, Supervisor
from orchestrator.supervisor.stop import stop_job
from orchestrator.supervisor.view import JobView, view_job

RUNS_KEPT = 5
SWEEP_GRACE_S = 2.0
DRIVER_WAIT_S = 1.0
"""Whoever looks at a job takes its lock for a moment; a driver holds it for the whole start."""


@dataclass(frozen=True, kw_only=True)
class Admission:
    """The right to bring a recorded job up."""

    job: StoredJob
    lock: DriverLock


@dataclass(frozen=True, kw_only=True)
class JobService:
    """Plan, start, look at and stop jobs on this machine. Calls block; any thread may make them."""

    store: JobStore
    backend: Callable[[], Backend]
    """A backend per call: what it started, it alone can wait for."""
    facts: Callable[[JobSpec, Path, frozenset[int]], ClusterFacts]
    """Of a job's spec, its folder and the ports of other jobs."""
    socket_dir: Callable[[Path], Path]
    probe: ReadinessProbe
    questions: EngineQuestions
    gate: Gate

    def plan(self, spec: JobSpec) -> JobPlan:
        """The plan as it would be started now. Starts nothing.

        Raises:
            PlanRefused: nothing can be laid out.
        """
        reserved = self.store.reserved_ports(except_job=spec.name)
        return build_plan(spec, self.facts(spec, self.store.folder(spec.name), reserved))

    def admit(self, spec: JobSpec) -> Admission:
        """Plan a job, record it as starting, and keep every other driver off it. Starts nothing yet.

        Raises:
            PlanRefused: the plan must not be started.
            JobExists: a job of this name is recorded and not ended.
            Unsupported: the launch backend is not in this version.
        """
        if spec.launch.backend != "local":
            mend = 'set launch.backend = "local"; `headrace render` shows the plan all the same'
            raise Unsupported(
                f"launch.backend: this version starts jobs with local only, not {spec.launch.backend}; {mend}"
            )
        plan = self.plan(spec)
        refuse_errors(plan)
        folder = self.store.folder(spec.name)
        lock = self._lock(spec.name)
        try:
            self.store.create(
                plan, run_id=uuid.uuid4().hex, directory=folder, socket_dir=self.socket_dir(folder), now=time.time()
            )
        except BaseException:
            lock.release()
            raise
        return Admission(job=self.store.get(spec.name), lock=lock)

    def resume(self, name: str) -> Admission:
        """Take over a start whose driver is gone.

        Raises:
            JobExists: another process drives it.
        """
        lock = self._lock(name)
        return Admission(job=self.store.get(name), lock=lock)

    def _lock(self, name: str) -> DriverLock:
        lock = DriverLock(self.store.folder(name))
        if not lock.acquire(wait_s=DRIVER_WAIT_S):
            raise JobExists(f"job {name!r} is being brought up or stopped by another process")
        return lock

    def drive(self, admission: Admission, progress: ProgressSink) -> StoredJob:
        """Bring an admitted job up. When that fails, everything that was started is ended first.

        Raises:
            JobFailed: with the cause, the log and its last lines.
        """
        job, lock = admission.job, admission.lock
        name = job.name
        backend = self.backend()
        supervisor = Supervisor(
            store=self.store,
            backend=backend,
            probe=self.probe,
            questions=self.questions,
            gate=self.gate,
        )
        try:
            backend.sweep(job.run, job.records, SWEEP_GRACE_S)
            if not job.units:
                _write_token(Path(job.plan.router.token_file))
                _drop_old_logs(job.run.log_dir.parent)
                backend.prepare(job.run, job.plan.units, job.plan.files)
            return supervisor.bring_up(name, progress)
        except Overtaken:
            raise JobFailed(f"job {name!r} was stopped by another command while it was coming up") from None
        except (JobFailed, DeployError) as error:
            lock.release()
            stop_job(self.store, backend, name, end_phase="failed", reason=str(error))
            raise JobFailed(str(error)) from error
        except BaseException:
            lock.release()
            stop_job(self.store, backend, name, reason="its start was interrupted")
            raise
        finally:
            lock.release()

    def view(self, name: str) -> JobView:
        """The job as it is now.

        Raises:
            JobUnknown: none is recorded.
        """
        return view_job(self.store.get(name), self.backend(), self.probe)

    def views(self) -> list[JobView]:
        return [view_job(job, self.backend(), self.probe) for job in self.store.all()]

    def stop(self, name: str, say: Callable[[str], None] = lambda _text: None) -> StoredJob:
        """End the job and everything that was started for it."""
        return stop_job(self.store, self.backend(), name, say=say)


def _drop_old_logs(folder: Path) -> None:
    """Keep the logs of the last runs; their folders are named by time."""
    for old in sorted(folder.glob("*Z-*"))[:-RUNS_KEPT]:
        shutil.rmtree(old, ignore_errors=True)


def _write_token(path: Path) -> None:
    """A fresh token for the router's internal port, readable by this user alone."""
    path.parent.mkdir(parents=True, exist_ok=True)
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(fd, "w", encoding="ascii") as file:
        file.write(secrets.token_urlsafe(32) + "\n")
