"""What the CLI and the control API both stand on: plan, start, look at and stop jobs.

It orders the steps; what each step is lies in `plan/`, `supervisor/`, `store/` and the launch backend, and `compose.py`
chooses the implementations.
"""

from __future__ import annotations

import shutil
import time
import uuid
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

from connectors.pool_client import PoolUse
from deploy.backend import Backend
from deploy.errors import DeployError
from orchestrator.errors import (
    AuditRefused,
    JobDiffers,
    JobExists,
    JobFailed,
    JobUnknown,
    PlanRefused,
    SpecError,
    StopRefused,
    Unsupported,
)
from orchestrator.plan.build import build_plan, refuse_errors
from orchestrator.plan.facts import ClusterFacts
from orchestrator.plan.types import Finding, JobPlan, PoolPlan, RouterPlan
from orchestrator.replica_service import ReplicaService
from orchestrator.spec.difference import differences
from orchestrator.spec.job import JobSpec
from orchestrator.store.home import StateUnusable
from orchestrator.store.jobs import JobStore, PortsReserved
from orchestrator.store.locks import DriverLock
from orchestrator.store.records import ENDED, SERVING, Phase, RecordUnreadable, StoredJob
from orchestrator.store.tokens import write_fresh_token
from orchestrator.supervisor.adoption import note_adoption
from orchestrator.supervisor.interfaces import (
    EngineQuestions,
    LetRequestsEnd,
    Opening,
    Progress,
    ProgressSink,
    ReadinessProbe,
)
from orchestrator.supervisor.start import Overtaken, Starter
from orchestrator.supervisor.stop import SWEEP_GRACE_S, StopIncomplete, stop_job
from orchestrator.supervisor.view import JobGlance, JobView, ServedVersion, glance_at_jobs, view_job
from orchestrator.weight_service import WeightService
from orchestrator.weights.audit import Audited, audit
from orchestrator.weights.router_client import RouterTraffic

EVENTS_SHOWN = 10
RUNS_KEPT = 5
PLANS_TRIED = 3
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
    backends: tuple[str, ...]
    """Those of `launch.backend` that jobs can be started with."""
    backend: Callable[[], Backend]
    """A backend per call. They share what they have started."""
    facts: Callable[[JobSpec, Path, frozenset[int]], ClusterFacts]
    """Of a job's spec, its folder and the ports of other jobs."""
    probe: ReadinessProbe
    questions: EngineQuestions
    pool_use: Callable[[PoolPlan], PoolUse | str]
    router_traffic: Callable[[RouterPlan], RouterTraffic | str]
    open_job: Opening
    let_requests_end: LetRequestsEnd
    weights: WeightService
    replicas: ReplicaService
    driver_wait_s: float = DRIVER_WAIT_S
    doing: dict[str, str] = field(default_factory=dict)
    """What the starts that this service drives are at, by job."""
    unrecorded: dict[str, str] = field(default_factory=dict)
    """Why starts have failed, by run, where the record may not say it."""

    def plan(self, spec: JobSpec) -> JobPlan:
        """The plan as it would be started now. Starts nothing.

        Raises:
            PlanRefused: nothing can be laid out.
        """
        reserved = self.store.reserved_ports(except_job=spec.name)
        return build_plan(spec, self.facts(spec, self.store.folder(spec.name), reserved))

    def findings(self, spec: JobSpec) -> tuple[Finding, ...]:
        """All that is to be said of a job that would be started now; an error keeps it from that. Records nothing."""
        try:
            return self.plan(spec).findings
        except (PlanRefused, SpecError) as refused:
            return tuple(Finding(severity="error", **vars(complaint)) for complaint in refused.complaints)

    def admit_once(self, spec: JobSpec) -> Admission | None:
        """As `admit`; None where the job lives already, and was started from the same job file.

        Raises:
            JobDiffers: it was started from another one.
        """
        try:
            return self.admit(spec)
        except JobExists:
            job = self.store.find(spec.name)
            if job is None or job.phase in (*ENDED, "stopping"):
                raise
            differing = differences(job.plan.spec, spec)
            if differing:
                raise JobDiffers(spec.name, job.phase, differing) from None
            return None

    def admit(self, spec: JobSpec) -> Admission:
        """Plan a job, record it as starting, and keep every other driver off it. Starts nothing yet.

        Raises:
            PlanRefused: the plan must not be started.
            JobExists: a job of this name is recorded and not ended.
            Unsupported: the launch backend is not in this version.
        """
        if spec.launch.backend not in self.backends:
            mend = f'set launch.backend = "{self.backends[0]}"; `headrace render` shows the plan all the same'
            known = f"this version starts jobs with {', '.join(self.backends)} only"
            raise Unsupported(f"launch.backend: {known}, not {spec.launch.backend}; {mend}")
        self.store.refuse_recorded(spec.name)
        plan = self._plan_to_start(spec)
        lock = self._lock(spec.name)
        try:
            self._end_leftovers(spec.name, lock)
            self._record(spec, plan)
            return Admission(job=self.store.get(spec.name), lock=lock)
        except BaseException:
            lock.release()
            raise

    def resume(self, name: str) -> Admission:
        """Take over a start whose driver is gone.

        Raises:
            JobUnknown: none is recorded.
            JobExists: another process drives it, or it is no longer coming up.
            RecordUnreadable: another version planned it.
        """
        lock = self._lock(name)
        try:
            job = self.store.get(name)
            job.check_plan()
            if job.phase != "starting":
                raise JobExists(f"job {name!r} is {job.phase}; there is no start to take over")
            note_adoption(self.store, self.backend(), self.probe, job, "its start goes on")
            return Admission(job=job, lock=lock)
        except BaseException:
            lock.release()
            raise

    def drive(self, admission: Admission, show: ProgressSink) -> StoredJob:
        """Bring an admitted job up. When that fails, everything that was started is ended first.

        Raises:
            JobFailed: with the cause, the log and its last lines.
        """
        name, backend = admission.job.name, self.backend()

        def noting(progress: Progress) -> None:
            self.doing[name] = progress.now_doing
            show(progress)

        try:
            self._prepare(backend, admission.job)
            return self._starter(backend).bring_up(name, noting)
        except Overtaken:
            raise JobFailed(f"job {name!r} was stopped by another command while it was coming up") from None
        except (JobFailed, JobUnknown, DeployError, StateUnusable) as error:
            raise JobFailed(self._end(backend, admission, "failed", str(error), show)) from error
        except Exception as error:
            self._end(backend, admission, "failed", f"unexpected {type(error).__name__}: {error}", show)
            raise
        except BaseException:
            self._end(backend, admission, "stopped", "its start was interrupted", show)
            raise
        finally:
            self.doing.pop(name, None)
            admission.lock.release()

    def _plan_to_start(self, spec: JobSpec) -> JobPlan:
        plan = self.plan(spec)
        refuse_errors(plan)
        return plan

    def _record(self, spec: JobSpec, plan: JobPlan) -> None:
        """Record the job as starting; planned again where another job took the same ports since."""
        folder = self.store.folder(spec.name)
        for tries_left in range(PLANS_TRIED - 1, -1, -1):
            try:
                self.store.create(plan, run_id=uuid.uuid4().hex, directory=folder, now=time.time())
                return
            except PortsReserved:
                if not tries_left:
                    raise
                plan = self._plan_to_start(spec)

    def _lock(self, name: str) -> DriverLock:
        lock = DriverLock(self.store.folder(name))
        if not lock.acquire(wait_s=self.driver_wait_s):
            raise JobExists(f"job {name!r} is being brought up or stopped by another process")
        return lock

    def _end_leftovers(self, name: str, lock: DriverLock) -> None:
        """A new run's record takes the place of the old one's, which is what finds the old one's processes."""
        old = self.store.find(name)
        if old is not None and old.phase in ENDED:
            stop_job(self.store, self.backend(), name, held=lock)

    def _starter(self, backend: Backend) -> Starter:
        return Starter(
            store=self.store, backend=backend, probe=self.probe, questions=self.questions, open_job=self.open_job
        )

    def _prepare(self, backend: Backend, job: StoredJob) -> None:
        """End what a killed driver started and did not record; for a fresh start, write the files."""
        left = backend.sweep(job.run, job.records, SWEEP_GRACE_S)
        if left:
            raise JobFailed(f"processes of an earlier driver could not be ended: {', '.join(map(str, left))}")
        if not job.units:
            write_fresh_token(Path(job.plan.router.token_file))
            _drop_old_logs(job.run.log_dir)
            backend.prepare(job.run, job.plan.units, job.plan.files)

    def _end(self, backend: Backend, admission: Admission, phase: Phase, reason: str, show: ProgressSink) -> str:
        """End all that was started; an interruption begins that anew, once. Returns the reason, and what is left."""
        name = admission.job.name
        end = partial(stop_job, self.store, backend, name, end_phase=phase, reason=reason, held=admission.lock)
        try:
            try:
                end()
            except KeyboardInterrupt:
                show(Progress(units=(), now_doing=f"ending {name}; interrupt again to leave it as it is"))
                end()
        except (StopIncomplete, StateUnusable) as error:
            self.unrecorded[admission.job.run_id] = reason
            return f"{reason}\n  {error}"
        return reason

    def view(self, name: str) -> JobView:
        """The job as it is now.

        Raises:
            JobUnknown: none is recorded.
        """
        view = self._view(name)
        pool = view.job.plan.pool
        if pool is None or view.phase not in SERVING:
            return replace(view, pool_use=f"the job is {view.phase}")
        return replace(view, pool_use=self.pool_use(pool))

    def _view(self, name: str) -> JobView:
        view = view_job(self.store, name, self.backend(), self.probe)
        events = tuple(self.store.events.newest(EVENTS_SHOWN, name))
        view = replace(view, events=events, now_doing=self.doing.get(name, ""))
        if view.phase == "abandoned" and (cause := self.unrecorded.get(view.job.run_id)) and cause not in view.reason:
            view = replace(view, reason=f"{cause}; {view.reason}")
        if view.phase in SERVING and (troubles := self.replicas.troubles(view)):
            view = replace(view, phase="degraded", reason="; ".join(filter(None, [view.reason, *troubles])))
        position = self.weights.position(name)
        if position is None:
            return view
        committed = position.committed
        return replace(view, serves=ServedVersion(version=committed.version, epoch=committed.epoch))

    def glances(self) -> list[JobGlance]:
        """At all jobs: what is recorded, and which processes live."""
        return glance_at_jobs(self.store, self.backend())

    def traffic(self, name: str) -> RouterTraffic | str:
        """What passes through the job's router now, or why that is not known.

        Raises:
            JobUnknown: none is recorded.
        """
        job = self.store.get(name)
        return self.router_traffic(job.plan.router) if job.phase in SERVING else f"the job is {job.phase}"

    def audit(self, name: str, most: int) -> tuple[Audited, ...]:
        """Whether the job answers as it would without any cache: of its newest kept requests at most so many, or as
        many probes.

        Raises:
            JobUnknown: none is recorded.
            AuditFailed: it could not be made; `AuditRefused` where the job does not serve.
        """
        job = self.store.get(name)
        if job.phase not in SERVING:
            raise AuditRefused(f"job {name!r} is {job.phase}: a job that serves can be audited")
        return audit(job.plan, most)

    def stop(self, name: str, say: Callable[[str], None] = lambda _text: None) -> StoredJob:
        """End the job and everything that was started for it, at once.

        Raises:
            JobUnknown: none is recorded.
            StopIncomplete: processes are left, and the text names their pids; or all have ended, and the record is
                stale.
        """
        # What cannot be recorded is done all the same, and said then.
        with suppress(StateUnusable):
            self.begin_stop(name)
        return self.end(name, say)

    def begin_stop(self, name: str) -> None:
        """Record that the job is to end at once; `end` ends it.

        Raises:
            JobUnknown: none is recorded.
        """
        job = self.store.get(name)
        self.store.ask_stop(name, job.run_id, drain_until=None, now=time.time())

    def begin_drain(self, name: str, limit_s: float | None) -> None:
        """As `begin_stop`, once open requests have finished, or after so long: that of `weights.limits.drain` where it
        is left out. Of a job that drains already, the limit changes.

        Raises:
            JobUnknown: none is recorded.
            StopRefused: it does not serve, or new weights are on their way to its engines.
        """
        job = self.store.get(name)
        drains = job.phase == "stopping" and job.drain_until is not None
        if job.phase not in (*SERVING, *ENDED) and not drains:
            raise StopRefused(f"job {name!r} is {job.phase}: there is nothing to drain; stop it with mode=now")
        update = self.weights.newest(name)
        if job.phase in SERVING and update is not None and update.outcome is None:
            mend = "wait for its end, cancel it, or stop the job with mode=now"
            raise StopRefused(f"update {update.number} of job {name!r} is under way; {mend}")
        until = time.time() + (job.plan.weights.limits.drain_s if limit_s is None else limit_s)
        self.store.ask_stop(name, job.run_id, drain_until=until, now=time.time())

    def end(self, name: str, say: Callable[[str], None] = lambda _text: None) -> StoredJob:
        """Carry a stop out that was begun. Raises as `stop` does."""
        return stop_job(self.store, self.backend(), name, say=say, let_requests_end=self.let_requests_end)

    def forget(self, name: str) -> None:
        """Delete the record of a job that has ended. Its files and logs stay.

        Raises:
            JobUnknown: none is recorded.
            JobExists: it has not ended, or another process drives it.
            StopIncomplete: processes of it are left; the text names their pids.
        """
        self.store.get(name)
        lock = self._lock(name)
        try:
            job = self.store.get(name)
            if job.phase not in ENDED:
                raise JobExists(f"job {name!r} is {job.phase}; stop it first with `headrace down {name}`")
            stop_job(self.store, self.backend(), name, held=lock)
            self.store.delete(name, job.run_id)
        finally:
            lock.release()

    def finish_stop(self, name: str) -> None:
        """End a job whose stop was begun by a process that is gone. Raises as `stop` does."""
        with suppress(RecordUnreadable):
            note_adoption(self.store, self.backend(), self.probe, self.store.get(name), "its stop goes on")
        self.end(name)

    def is_driven(self, name: str) -> bool:
        """Whether some process is bringing the job up or ending it."""
        return DriverLock(self.store.folder(name)).held_by_anyone()


def _drop_old_logs(log_dir: Path) -> None:
    """Keep the logs of the last runs, the one that begins included; their folders are named by time."""
    earlier = sorted(folder for folder in log_dir.parent.glob("*Z-*") if folder != log_dir)
    for old in earlier[: -(RUNS_KEPT - 1)]:
        shutil.rmtree(old, ignore_errors=True)
