"""Wire models of the control API, and how a `JobView` becomes one. `headrace status --json` prints the same."""

from __future__ import annotations

import time

from orchestrator.api.examples import JOB, JOBS
from orchestrator.api.wire import Note, WireModel
from orchestrator.store.jobs import Phase
from orchestrator.supervisor.state import UnitState
from orchestrator.supervisor.view import JobView


class UnitStatus(WireModel):
    name: str
    node: str
    state: UnitState
    pid: int | None
    seconds: float
    """To ready, or age while it is not."""
    detail: str
    log: str


class EngineStatus(WireModel):
    name: str
    role: str
    url: str
    state: UnitState


class RouterStatus(WireModel):
    url: str


class PoolStatus(WireModel):
    master_address: str
    metrics_url: str | None
    capacity_bytes: int
    cache_prefix: str


class WeightsServed(WireModel):
    version: str
    epoch: int


class JobStatus(WireModel, json_schema_extra={"examples": [JOB]}):
    name: str
    phase: Phase
    reason: str
    age_s: float
    directory: str
    model: str
    """What a request may say in "model"."""
    units: list[UnitStatus]
    engines: list[EngineStatus]
    router: RouterStatus
    weights: WeightsServed | None
    """None before the job has come up."""
    pool: PoolStatus | None
    prometheus_url: str | None
    warnings: list[Note]


class JobList(WireModel, json_schema_extra={"examples": [JOBS]}):
    jobs: list[JobStatus]


def job_status(view: JobView) -> JobStatus:
    plan = view.job.plan
    states = {unit.name: unit.state for unit in view.units}
    pool = None
    if plan.pool is not None:
        pool = PoolStatus(
            master_address=plan.pool.master_address,
            metrics_url=plan.pool.metrics_url,
            capacity_bytes=plan.pool.capacity_bytes,
            cache_prefix=plan.pool.cache_prefix,
        )
    return JobStatus(
        name=view.job.name,
        phase=view.phase,
        reason=view.reason,
        age_s=round(time.time() - view.job.created_at, 1),
        directory=str(view.job.directory),
        model=plan.model_name,
        units=[
            UnitStatus(
                name=unit.name,
                node=unit.node,
                state=unit.state,
                pid=unit.pid,
                seconds=round(unit.seconds, 1),
                detail=unit.detail,
                log=unit.log,
            )
            for unit in view.units
        ],
        engines=[
            EngineStatus(name=engine.name, role=engine.role, url=engine.url, state=states[engine.name])
            for engine in plan.engines
        ],
        router=RouterStatus(url=plan.router.url),
        weights=None if view.serves is None else WeightsServed(version=view.serves.version, epoch=view.serves.epoch),
        pool=pool,
        prometheus_url=plan.prometheus_url,
        warnings=[Note(field=note.field, problem=note.problem, mend=note.mend) for note in plan.findings],
    )
