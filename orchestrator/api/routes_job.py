"""`/jobs`: start, look at and stop jobs. A handler parses, makes one call of the service, and answers."""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Annotated, Any

from fastapi import APIRouter, Query, Request, Response
from fastapi.concurrency import run_in_threadpool

from orchestrator.api.audit_schemas import AuditBody, AuditStatus, audit_status
from orchestrator.api.document import JOB_FILE_BODY
from orchestrator.api.problems import UnknownBodyType, UnreadableBody, declared
from orchestrator.api.schemas import JobList, JobStatus, job_status
from orchestrator.errors import Complaint, HeadraceError, JobExists, SpecError
from orchestrator.service import JobService
from orchestrator.spec.load import job_from_data, parse_job_text
from orchestrator.supervisor.interfaces import Progress

_LOG = logging.getLogger(__name__)
SYNTAX_OF = {
    "application/json": "json",
    "application/toml": "toml",
    "text/toml": "toml",
    "text/x-toml": "toml",
}
"""Other types are refused: a web page can make a browser post text/plain here, but none of these unasked."""


def job_routes(service: JobService) -> APIRouter:
    routes = APIRouter(tags=["jobs"])

    @routes.post("/jobs", status_code=202, responses=declared(409, 415), openapi_extra=JOB_FILE_BODY)
    async def start_job(request: Request) -> JobStatus:
        """Start a job: the body is a job file (application/json or application/toml). Answers once it is planned and
        recorded; `GET /jobs/{name}` says how far it is."""
        spec = job_from_data(_job_table(await request.body(), request.headers.get("content-type", "")), source="body")
        admission = await run_in_threadpool(service.admit, spec)
        _in_background(partial(service.drive, admission, _ignore), name=f"start {spec.name}")
        return job_status(await run_in_threadpool(service.view, spec.name))

    @routes.get("/jobs")
    async def list_jobs() -> JobList:
        """All recorded jobs, each looked at now."""
        return JobList(jobs=[job_status(view) for view in await run_in_threadpool(service.views)])

    @routes.get("/jobs/{name}", responses=declared(404))
    async def show_job(name: str) -> JobStatus:
        """A job as it is: every process is looked at now."""
        return job_status(await run_in_threadpool(service.view, name))

    @routes.delete("/jobs/{name}", responses={**declared(404), 202: {"model": JobStatus}})
    async def stop_job(name: str, response: Response, wait: Annotated[bool, Query()] = True) -> JobStatus:
        """Stop a job and all its processes. `wait=false` answers at once with 202."""
        if wait:
            await run_in_threadpool(service.stop, name)
        else:
            await run_in_threadpool(service.begin_stop, name)
            _in_background(partial(service.stop, name), name=f"stop {name}")
            response.status_code = 202
        return job_status(await run_in_threadpool(service.view, name))

    @routes.post("/jobs/{name}/audit", responses=declared(404, 503))
    async def audit(name: str, body: AuditBody) -> AuditStatus:
        """Replay requests without cache and compare. Answers when that is done: seconds for each."""
        return audit_status(await run_in_threadpool(service.audit, name, body.requests))

    return routes


def resume_starts(service: JobService) -> None:
    """Take over what another control plane was in the middle of when it ended: starts, and stops too."""
    for name in service.store.names():
        try:
            _resume(service, name)
        except HeadraceError as error:
            # One job's unreadable record must not keep the API from answering for the others.
            _LOG.warning("%s: not resumed: %s", name, error)


def _resume(service: JobService, name: str) -> None:
    job = service.store.get(name)
    if job.phase == "starting":
        with suppress(JobExists):
            admission = service.resume(name)
            _in_background(partial(service.drive, admission, _ignore), name=f"start {name}")
    elif job.phase == "stopping" and not service.is_driven(name):
        _in_background(partial(service.finish_stop, name), name=f"stop {name}")


def _job_table(body: bytes, content_type: str) -> dict[str, Any]:
    syntax = SYNTAX_OF.get(content_type.partition(";")[0].strip().lower())
    if syntax is None:
        problem = f"is {content_type or 'not given'}"
        complaint = Complaint(field="content-type", problem=problem, mend="send application/json or application/toml")
        raise UnknownBodyType("body", [complaint])
    try:
        table = parse_job_text(body.decode("utf-8"), source="body", syntax=syntax)
        # JSON can spell half of a surrogate pair, which no text has: it could be neither recorded nor shown.
        json.dumps(table, ensure_ascii=False, default=str).encode("utf-8")
    except UnicodeError as error:
        complaint = Complaint(field="body", problem="is not valid text", mend="send UTF-8")
        raise UnreadableBody("body", [complaint]) from error
    except RecursionError as error:
        # TOML can nest tables without nesting brackets.
        complaint = Complaint(field="syntax", problem="tables or lists are nested too deep", mend="nest less")
        raise UnreadableBody("body", [complaint]) from error
    except SpecError as error:
        raise UnreadableBody(error.source, error.complaints) from error
    return table


def _in_background(act: Callable[[], object], name: str) -> None:
    """Failures are recorded as the job's phase and reason by the act itself; the log has them too."""

    def run() -> None:
        try:
            act()
        except HeadraceError as error:
            _LOG.warning("%s: %s", name, error)
        except Exception:
            _LOG.exception("%s failed in a way that was not foreseen", name)

    threading.Thread(target=run, name=name, daemon=True).start()


def _ignore(progress: Progress) -> None:
    """Nobody watches: progress is read from the record by GET."""
    del progress
