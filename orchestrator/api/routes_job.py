"""`/jobs`: start, look at and stop jobs. A handler parses, makes one call of the service, and answers."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from functools import partial
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Query, Request, Response
from fastapi.concurrency import run_in_threadpool

from orchestrator.api.audit_schemas import AuditBody, AuditStatus, audit_status
from orchestrator.api.job_file import IN_DOCUMENT, job_file
from orchestrator.api.long_calls import LongCalls
from orchestrator.api.operation_schemas import BEGUN, point_to
from orchestrator.api.problems import declared
from orchestrator.api.schemas import JobList, JobStatus, job_status, job_summary
from orchestrator.api.traffic_schemas import TrafficStatus, traffic_status
from orchestrator.background import in_background
from orchestrator.operations import id_of
from orchestrator.service import JobService
from orchestrator.store.home import StateUnusable
from orchestrator.supervisor.interfaces import Progress

Wait = Annotated[bool, Query(description="Until all has ended; else answer once it is noted.")]
StopMode = Annotated[
    Literal["now", "drain"],
    Query(description="drain: start no new requests and let open ones finish first; only of a job that serves."),
]
DrainLimit = Annotated[
    float | None,
    Query(gt=0, le=86_400, description="How long they may take; `weights.limits.drain` of the job when left out."),
]

A_FEW = AuditBody()
_ANSWERS: dict[int | str, dict[str, Any]] = {
    **declared(415),
    **BEGUN,
    200: {"model": JobStatus, "description": "It lives already"},
}


def job_routes(service: JobService, calls: LongCalls) -> APIRouter:
    routes = APIRouter(tags=["jobs"])

    @routes.post("/jobs", status_code=202, responses=_ANSWERS, openapi_extra=IN_DOCUMENT)
    async def start_job(request: Request, response: Response) -> JobStatus:
        """Start a job: the body is a job file. Answers once it is planned and recorded; `GET /jobs/{name}` says how far
        it is. May be asked again: while a job lives that was started from the same job file, it is answered with, and
        200 says that this call has begun nothing; from another one, a 409 says what differs."""
        spec = await job_file(request)
        admission = await run_in_threadpool(service.admit_once, spec)
        if admission is None:
            response.status_code = 200
        else:
            in_background(partial(service.drive, admission, _ignore), name=f"start {spec.name}")
        status = job_status(await run_in_threadpool(service.view, spec.name))
        point_to(response, status.operation)
        return status

    @routes.get("/jobs")
    async def list_jobs() -> JobList:
        """All recorded jobs, and which of their processes live; `GET /jobs/{name}` looks closer."""
        return JobList(jobs=[job_summary(glance) for glance in await run_in_threadpool(service.glances)])

    @routes.get("/jobs/{name}", responses=declared(404))
    async def show_job(name: str) -> JobStatus:
        """A job as it is: every process is looked at now."""
        return job_status(await run_in_threadpool(service.view, name))

    @routes.get("/jobs/{name}/traffic", responses=declared(404))
    async def traffic(name: str) -> TrafficStatus:
        """What passes through a job's router now: its gate, and the sessions and requests of each replica."""
        return traffic_status(await run_in_threadpool(service.traffic, name))

    @routes.delete("/jobs/{name}", responses={**declared(404), 202: {"model": JobStatus, **BEGUN[202]}})
    async def stop_job(
        name: str, response: Response, wait: Wait = True, mode: StopMode = "now", limit_s: DrainLimit = None
    ) -> JobStatus:
        """Stop a job and all its processes. `wait=false` answers at once with 202. May be asked again: `now` ends the
        drain of a stop that is under way."""
        if mode == "drain":
            await run_in_threadpool(service.begin_drain, name, limit_s)
        elif wait:
            # What cannot be recorded is done all the same, and said then.
            with suppress(StateUnusable):
                await run_in_threadpool(service.begin_stop, name)
        else:
            await run_in_threadpool(service.begin_stop, name)
        job = await run_in_threadpool(service.store.get, name)
        ending = calls.end(id_of(name, job.run_id, "stop"))
        if wait:
            await asyncio.wrap_future(ending)
        else:
            response.status_code = 202
        status = job_status(await run_in_threadpool(service.view, name))
        point_to(response, status.operation)
        return status

    @routes.delete("/jobs/{name}/record", status_code=204, responses=declared(404))
    async def forget_job(name: str) -> None:
        """Forget a job that has ended. Its files and logs stay."""
        await run_in_threadpool(service.forget, name)

    @routes.post("/jobs/{name}/audit", responses=declared(404, 503))
    async def audit_job(name: str, body: AuditBody = A_FEW) -> AuditStatus:
        """Replay requests without cache and compare. Answers when that is done: seconds for each."""
        audited = await asyncio.wrap_future(calls.audit(name, body.requests))
        return audit_status(audited)

    return routes


def _ignore(progress: Progress) -> None:
    """Nobody watches: progress is read from the record by GET."""
    del progress
