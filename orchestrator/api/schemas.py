"""Wire models of the control API, and how a `JobView` becomes one. `headrace status --json` prints the same."""

from __future__ import annotations

import time
from collections.abc import Sequence

from connectors.pool_client import PoolUse
from orchestrator.api.event_schemas import EventStatus, event_status
from orchestrator.api.examples import JOB, JOBS, VERDICT
from orchestrator.api.wire import Note, WireModel
from orchestrator.operations import newest_of_run
from orchestrator.plan.types import Finding, Severity
from orchestrator.spec.difference import spec_hash
from orchestrator.store.records import Phase
from orchestrator.supervisor.state import UnitState
from orchestrator.supervisor.view import JobGlance, JobView


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


class PoolUseStatus(WireModel):
    """Of the whole pool, other jobs' part of it included."""

    mounted_bytes: int
    """DRAM that storage clients lend now."""
    used_bytes: int
    keys: int


class PoolStatus(WireModel):
    master_address: str
    metrics_url: str | None
    capacity_bytes: int
    """What the job's storage clients are to lend."""
    cache_prefix: str
    use: PoolUseStatus | None
    use_unknown: str
    """Why `use` is null; empty where it is not."""


class WeightsServed(WireModel):
    version: str
    epoch: int


class JobStatus(WireModel, json_schema_extra={"examples": [JOB]}):
    name: str
    phase: Phase
    reason: str
    operation: str
    """Id under /operations: of its stop once that was asked for, else of its start."""
    now_doing: str = ""
    """What a start awaits, in words; empty where it is driven by another process than the one that answers."""
    age_s: float
    directory: str
    spec_hash: str
    """Equal for job files that ask for the same."""
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
    events: list[EventStatus]
    """The newest few, in their order."""


class JobSummary(WireModel):
    name: str
    phase: Phase
    reason: str
    age_s: float
    directory: str
    processes: int
    """That were started."""
    alive: int
    """Of these. Whether they answer, `GET /jobs/{name}` asks them."""


class Verdict(WireModel, json_schema_extra={"examples": [VERDICT]}):
    """On a job file that was not started."""

    is_usable: bool
    """Whether it could be started now."""
    errors: list[Note]
    warnings: list[Note]


class JobList(WireModel, json_schema_extra={"examples": [JOBS]}):
    jobs: list[JobSummary]


def verdict(findings: Sequence[Finding]) -> Verdict:
    errors = notes(findings, "error")
    return Verdict(is_usable=not errors, errors=errors, warnings=notes(findings, "warning"))


def notes(findings: Sequence[Finding], severity: Severity) -> list[Note]:
    return [Note(field=one.field, problem=one.problem, mend=one.mend) for one in findings if one.severity == severity]


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
            use=PoolUseStatus(**vars(view.pool_use)) if isinstance(view.pool_use, PoolUse) else None,
            use_unknown=view.pool_use if isinstance(view.pool_use, str) else "",
        )
    return JobStatus(
        name=view.job.name,
        phase=view.phase,
        reason=view.reason,
        operation=str(newest_of_run(view.job)),
        now_doing=view.now_doing,
        age_s=round(time.time() - view.job.created_at, 1),
        directory=str(view.job.directory),
        spec_hash=spec_hash(plan.spec),
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
        warnings=notes(plan.findings, "warning"),
        events=[event_status(each) for each in view.events],
    )


def job_summary(glance: JobGlance) -> JobSummary:
    return JobSummary(
        name=glance.job.name,
        phase=glance.phase,
        reason=glance.reason,
        age_s=round(time.time() - glance.job.created_at, 1),
        directory=str(glance.job.directory),
        processes=len(glance.job.records),
        alive=len(glance.alive),
    )
