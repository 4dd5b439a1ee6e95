"""Brings a recorded job up: observe, ask `reconcile.py`, carry its answer out, until ready or failed.

The loop keeps nothing that the record does not have, so that another process can take a start over after this one was
killed. One process drives a job at a time (`store/locks.py`); a stop that comes meanwhile wins.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from deploy.backend import Backend
from deploy.logs import tail
from deploy.unit import LaunchUnit
from orchestrator.errors import JobFailed
from orchestrator.plan.types import EnginePlan, JobPlan
from orchestrator.store.jobs import JobStore, ended_event
from orchestrator.store.records import Phase, StoredJob
from orchestrator.supervisor.interfaces import (
    EngineQuestions,
    Opening,
    Progress,
    ProgressSink,
    ReadinessProbe,
    UnitProgress,
)
from orchestrator.supervisor.log_cause import fence_not_loaded, likely_cause, missing_library
from orchestrator.supervisor.probing import probe_units
from orchestrator.supervisor.reconcile import UnitFailure, first_failure, next_step
from orchestrator.supervisor.startup_checks import StartupFinding, caches_agree, pool_answers
from orchestrator.supervisor.state import SeenUnit, UnitState, unit_state

LOOK_EVERY_S = 0.3
LOG_LINES_SHOWN = 15
LOG_LINES_READ = 400


class Overtaken(Exception):
    """Another command stopped the job while it was coming up."""


@dataclass(frozen=True, kw_only=True)
class Starter:
    """Brings jobs up."""

    store: JobStore
    backend: Backend
    probe: ReadinessProbe
    questions: EngineQuestions
    open_job: Opening
    look_every_s: float = LOOK_EVERY_S

    def bring_up(self, name: str, progress: ProgressSink) -> StoredJob:
        """Start what is missing of a recorded job, wait until all is ready, check the engines, open the job.

        Raises:
            JobFailed: a unit or a check failed; the text says which, why, and where the log is. Nothing is ended yet.
            Overtaken: another command stopped the job.
        """
        run_id = self.store.get(name).run_id
        try:
            return self._bring_up(name, progress)
        except JobFailed:
            # Units that another command is ending look dead from here.
            if not self.store.is_starting(name, run_id):
                raise Overtaken from None
            raise

    def _bring_up(self, name: str, progress: ProgressSink) -> StoredJob:
        job = self._start_units(name, progress)
        shown = tuple(_progress(job, unit, None) for unit in job.plan.units)

        def say(doing: str) -> None:
            progress(Progress(units=shown, now_doing=doing))

        warnings = self._compare_caches(job, say)
        warnings += self._prove_pool(job, say)
        say("confirming the engines' weights, opening the router's gate")
        self._refuse_failed_units(job)
        if not self.store.is_starting(name, job.run_id):
            raise Overtaken
        try:
            self.open_job(job)
        except JobFailed:
            self._refuse_failed_units(job)
            raise
        phase: Phase = "degraded" if warnings else "ready"
        if not self.store.set_phase(name, job.run_id, phase, "; ".join(warnings), time.time()):
            raise Overtaken
        return self.store.get(name)

    def _compare_caches(self, job: StoredJob, say: Callable[[str], None]) -> list[str]:
        """Returns warnings; caches that do not fit together raise `JobFailed`."""
        say("comparing what the engines report of their caches")
        engines = job.plan.engines
        return _judge(caches_agree(engines, self.questions.cache_configs(engines)))

    def _prove_pool(self, job: StoredJob, say: Callable[[str], None]) -> list[str]:
        """Returns warnings; a pool that must answer and does not raises `JobFailed`."""
        plan = job.plan
        prober = _probing_engine(plan)
        if prober is None or plan.offload_probe == "off":
            return []
        say(f"sending a prompt twice to {prober.name}: does the pool answer?")
        probed = self.questions.probe_offload(prober, plan.model_name, f"headrace-probe-{job.run_id}")
        return _judge(pool_answers(probed, plan.offload_probe, plan.vllm_version))

    def _refuse_failed_units(self, job: StoredJob) -> None:
        """The checks can take minutes, in which a process may have died."""
        failure = first_failure(job.plan.units, self._look(job, {}), time.time())
        if failure is not None:
            raise JobFailed(_failure_text(job, failure))

    def _start_units(self, name: str, progress: ProgressSink) -> StoredJob:
        """Start stage after stage until every unit is ready; returns the job as recorded then."""
        details: dict[str, str] = {}
        while True:
            job = self.store.get(name)
            if job.phase != "starting":
                raise Overtaken
            seen = self._look(job, details)
            step = next_step(job.plan.units, seen, time.time())
            progress(_start_progress(job, seen))
            if step.failure is not None:
                raise JobFailed(_failure_text(job, step.failure))
            if step.all_ready:
                return self.store.get(name)
            for unit in (unit for unit in job.plan.units if unit.name in step.start):
                self._start(job, unit)
            if not step.start:
                time.sleep(self.look_every_s)

    def _start(self, job: StoredJob, unit: LaunchUnit) -> None:
        if not self.store.is_starting(job.name, job.run_id):
            raise Overtaken
        # Killed between these two lines: whoever comes next finds the process by the run's id and ends it.
        record = self.backend.start(job.run, unit)
        self.store.add_unit(job.name, job.run_id, record, time.time())

    def _look(self, job: StoredJob, details: dict[str, str]) -> dict[str, SeenUnit]:
        """Observe every started unit; a unit that was ready once is not probed again."""
        statuses = self.backend.poll(job.run, job.records)
        for stored in job.units:
            # Said once: a start whose process has ended goes no further.
            if not (status := statuses[stored.record.name]).alive:
                self.store.events.note(job.name, ended_event(stored.record, status.exit_code))
        probed = {stored.record.name for stored in job.units if stored.ready_at is None}
        units = [unit for unit in job.plan.units if unit.name in probed and statuses[unit.name].alive]
        results = probe_units(units, statuses, self.probe)
        now = time.time()
        details.update((name, result.detail) for name, result in results.items())
        ready = {name for name, result in results.items() if result.ready}
        for name in ready:
            self.store.set_ready(job.name, job.run_id, name, now)
        return {
            stored.record.name: SeenUnit(
                started_at=stored.started_at,
                alive=statuses[stored.record.name].alive,
                ready=stored.ready_at is not None or stored.record.name in ready,
                detail=details.get(stored.record.name, ""),
                exit_code=statuses[stored.record.name].exit_code,
            )
            for stored in job.units
        }


def _probing_engine(plan: JobPlan) -> EnginePlan | None:
    """The engine that the pool is proved on: the first that joins it and computes prompts."""
    joined = [engine for engine in plan.engines if engine.joins_pool and engine.role != "decode"]
    return joined[0] if joined else None


def _judge(finding: StartupFinding | None) -> list[str]:
    """The text of a warning, if it is one; a finding that must stop the job raises."""
    if finding is None:
        return []
    if finding.severity == "fail":
        raise JobFailed(finding.text)
    return [finding.text]


def _start_progress(job: StoredJob, seen: Mapping[str, SeenUnit]) -> Progress:
    units = tuple(_progress(job, unit, seen.get(unit.name)) for unit in job.plan.units)
    awaited = [
        f"{unit.name} ({unit.detail})" if unit.detail else unit.name for unit in units if unit.state == "starting"
    ]
    return Progress(units=units, now_doing="waiting for " + ", ".join(awaited) if awaited else "")


def _progress(job: StoredJob, unit: LaunchUnit, seen: SeenUnit | None) -> UnitProgress:
    """`seen` None: as recorded, which says whether the unit was started and ready."""
    stored = next((stored for stored in job.units if stored.record.name == unit.name), None)
    if stored is None:
        return UnitProgress(name=unit.name, state="waiting", seconds=0.0, detail="")
    until = stored.ready_at if stored.ready_at is not None else time.time()
    state: UnitState = "ready" if stored.ready_at is not None else "starting"
    if seen is not None:
        state = unit_state(seen)
    detail = seen.detail if seen is not None and state == "starting" else ""
    return UnitProgress(name=unit.name, state=state, seconds=max(0.0, until - stored.started_at), detail=detail)


def _failure_text(job: StoredJob, failure: UnitFailure) -> str:
    """One message: which unit, what happened, the cause from its log, where the log is, its last lines."""
    log = next(record.log for record in job.records if record.name == failure.unit)
    lines = tail(log, LOG_LINES_READ)
    cause = likely_cause(lines)
    library = missing_library(lines)
    mend = f"\n  mend: {library} is missing; `headrace doctor` names the package" if library else ""
    if fence_not_loaded(lines):
        mend = "\n  mend: this vLLM could not load its fence; install this version of Headrace for its interpreter"
    shown = "\n".join(f"    {line}" for line in lines[-LOG_LINES_SHOWN:])
    return f"{failure.unit} {failure.what}\n  cause: {cause}{mend}\n  log: {log}\n{shown}"
