"""Reads the job file that is the body of a request, for `routes_job.py` and `routes_plan.py`."""

from __future__ import annotations

import json
from typing import Any

from fastapi import Request
from fastapi.concurrency import run_in_threadpool

from orchestrator.api.examples import JOB_FILE, JOB_FILE_TOML
from orchestrator.api.problem_kinds import UnknownBodyType, UnreadableBody
from orchestrator.errors import Complaint, SpecError
from orchestrator.spec.job import JobSpec
from orchestrator.spec.load import job_from_data, parse_job_text

SYNTAX_OF = {
    "application/json": "json",
    "application/toml": "toml",
    "text/toml": "toml",
    "text/x-toml": "toml",
}
"""Other types are refused: a web page can make a browser post text/plain here, but none of these unasked."""

IN_DOCUMENT: dict[str, Any] = {
    "requestBody": {
        "required": True,
        "content": {
            "application/json": {"schema": {"$ref": f"#/components/schemas/{JobSpec.__name__}"}, "example": JOB_FILE},
            "application/toml": {"schema": {"type": "string"}, "example": JOB_FILE_TOML},
        },
    }
}
"""For the `openapi_extra` of a route that calls `job_file`."""


async def job_file(request: Request) -> JobSpec:
    """Raises `SpecError`: `UnknownBodyType` or `UnreadableBody` where it was not even looked at."""
    body, content_type = await request.body(), request.headers.get("content-type", "")
    # A large one takes its time, in which others want to be answered.
    return await run_in_threadpool(lambda: job_from_data(_table(body, content_type), source="body"))


def _table(body: bytes, content_type: str) -> dict[str, Any]:
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
