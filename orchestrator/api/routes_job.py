"""`/jobs`: start, look at and stop jobs. A handler parses, makes one call of the service, and answers."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Annotated, Any

from fastapi import APIRouter, Query, Request, Response
from fastapi.concurrency import run_in_threadpool

from orchestrator.api.schemas import JobList, JobStatus, job_status
from orchestrator.errors import Complaint, HeadraceError, JobExists, SpecError
from orchestrator.service import JobService
from orchestrator.spec.load import job_from_data, parse_job_text
from orchestrator.supervisor.interfaces import Progress

MAX_BODY_BYTES = 1 << 20
TOML_TYPES = ("application/toml", "text/toml", "text/x-toml")


def job_routes(service: JobService) -> APIRouter:
    routes = APIRouter(tags=["jobs"])

    @routes.post("/jobs", status_code=202)
    async def start_job(request: Request) -> JobStatus:
        """Start a job: the body is a job file, JSON or (content type application/toml) TOML. Answers at once;
        `GET /jobs/{name}` says how far it is."""
        spec = job_from_data(_job_table(await _body(request), request.headers.get("content-type", "")), source="body")
        admission = await run_in_threadpool(service.admit, spec)
        _in_background(partial(service.drive, admission, _ignore), name=f"start {spec.name}")
        return job_status(await run_in_threadpool(service.view, spec.name))

    @routes.get("/jobs")
    async def list_jobs() -> JobList:
        return JobList(jobs=[job_status(view) for view in await run_in_threadpool(service.views)])

    @routes.get("/jobs/{name}")
    async def show_job(name: str) -> JobStatus:
        return job_status(await run_in_threadpool(service.view, name))

    @routes.delete("/jobs/{name}")
    async def stop_job(name: str, response: Response, wait: Annotated[bool, Query()] = True) -> JobStatus:
        """Stop a job and all its processes. `wait=false` answers at once with 202."""
        service.store.get(name)
        if wait:
            await run_in_threadpool(service.stop, name)
        else:
            response.status_code = 202
            _in_background(partial(service.stop, name), name=f"stop {name}")
        return job_status(await run_in_threadpool(service.view, name))

    return routes


def resume_starts(service: JobService) -> None:
    """Take over jobs that were coming up when the process that drove them ended."""
    for job in service.store.all():
        if job.phase == "starting":
            with suppress(JobExists):
                admission = service.resume(job.name)
                _in_background(partial(service.drive, admission, _ignore), name=f"start {job.name}")


def _job_table(body: bytes, content_type: str) -> dict[str, Any]:
    syntax = "toml" if content_type.partition(";")[0].strip().lower() in TOML_TYPES else "json"
    try:
        text = body.decode("utf-8")
    except UnicodeDecodeError as error:
        raise SpecError(
            "body", [Complaint(field="body", problem=f"is not UTF-8: {error}", mend="send UTF-8")]
        ) from error
    return parse_job_text(text, source="body", syntax=syntax)


async def _body(request: Request) -> bytes:
    body = bytearray()
    async for chunk in request.stream():
        body += chunk
        if len(body) > MAX_BODY_BYTES:
            problem = f"is larger than {MAX_BODY_BYTES} bytes"
            raise SpecError("body", [Complaint(field="body", problem=problem, mend="send a job file")])
    return bytes(body)


def _in_background(act: Callable[[], object], name: str) -> None:
    """Failures are recorded as the job's phase and reason by the act itself."""

    def run() -> None:
        try:
            act()
        except HeadraceError:
            return

    threading.Thread(target=run, name=name, daemon=True).start()


def _ignore(progress: Progress) -> None:
    """Nobody watches: progress is read from the record by GET."""
    del progress
