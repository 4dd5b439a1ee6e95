"""Errors as problem details (RFC 9457): their wire model, which error of ours is which problem, and the handlers that
answer so. `server.py` hangs the handlers into the app; `guard.py` answers so as well."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any
from urllib.parse import quote

from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from orchestrator.api.examples import PROBLEM
from orchestrator.api.mends import mend_of
from orchestrator.api.wire import Note, WireModel
from orchestrator.errors import (
    AuditFailed,
    AuditRefused,
    CancelRefused,
    Complaint,
    HeadraceError,
    JobDiffers,
    JobExists,
    JobUnknown,
    OperationUnknown,
    PlanRefused,
    ProcessUnknown,
    RequestRefused,
    RequestUnknown,
    SpecError,
    StopRefused,
    Unsupported,
    UpdateFailed,
    UpdateRefused,
    UpdateUnended,
    UpdateUnknown,
)
from orchestrator.store.jobs import PortsReserved, RecordUnreadable

MEDIA_TYPE = "application/problem+json"
PLAIN_TYPE = "about:blank"
"""RFC 9457: the status says it all."""


class UnreadableBody(SpecError):
    """The body is no text, or no well-formed table: what stands in it was not looked at."""


class UnknownBodyType(SpecError):
    """The content type says neither JSON nor TOML."""


class Problem(WireModel, json_schema_extra={"examples": [PROBLEM]}):
    """Body of every answer that is not a success."""

    type: str
    """Which kind of problem; "about:blank" where the status says it all."""
    title: str
    """The kind in words, always the same."""
    status: int
    detail: str
    """What is wrong this time, with the values, and what mends it."""
    instance: str
    """The path that was called."""
    errors: list[Note]
    """Each thing that is wrong by its field, where fields are."""


@dataclass(frozen=True, kw_only=True)
class ProblemKind:
    error: type[HeadraceError]
    status: int
    title: str

    @property
    def type(self) -> str:
        return f"urn:headrace:problem:{self.title.lower().replace(' ', '-')}"


KINDS: tuple[ProblemKind, ...] = (
    ProblemKind(error=UnknownBodyType, status=415, title="Unknown body type"),
    ProblemKind(error=UnreadableBody, status=400, title="Unreadable body"),
    ProblemKind(error=SpecError, status=422, title="Unusable job file"),
    ProblemKind(error=PlanRefused, status=422, title="Job cannot run"),
    ProblemKind(error=Unsupported, status=422, title="Unsupported"),
    ProblemKind(error=JobUnknown, status=404, title="Unknown job"),
    ProblemKind(error=ProcessUnknown, status=404, title="Unknown process"),
    ProblemKind(error=UpdateUnknown, status=404, title="Unknown update"),
    ProblemKind(error=JobDiffers, status=409, title="Job differs"),
    ProblemKind(error=RequestUnknown, status=404, title="Unknown request"),
    ProblemKind(error=OperationUnknown, status=404, title="Unknown operation"),
    ProblemKind(error=StopRefused, status=409, title="Stop refused"),
    ProblemKind(error=CancelRefused, status=409, title="Cancel refused"),
    ProblemKind(error=JobExists, status=409, title="Job exists"),
    ProblemKind(error=UpdateRefused, status=409, title="Update refused"),
    ProblemKind(error=RequestRefused, status=409, title="Request refused"),
    ProblemKind(error=PortsReserved, status=409, title="Ports reserved"),
    ProblemKind(error=RecordUnreadable, status=409, title="Record unreadable"),
    ProblemKind(error=UpdateFailed, status=500, title="Update failed"),
    ProblemKind(error=AuditRefused, status=409, title="Audit refused"),
    ProblemKind(error=AuditFailed, status=503, title="Audit failed"),
    ProblemKind(error=UpdateUnended, status=504, title="Update unended"),
    ProblemKind(error=HeadraceError, status=500, title="Failed"),
)
"""The first that fits counts."""
INVALID_REQUEST = "urn:headrace:problem:invalid-request"


def declared(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """For a route's `responses`: problems of these statuses."""
    content = {MEDIA_TYPE: {"schema": {"$ref": f"#/components/schemas/{Problem.__name__}"}}}
    return {status: {"description": HTTPStatus(status).phrase, "content": content} for status in statuses}


def problem_reply(
    path: str,
    status: int,
    detail: str,
    *,
    type: str = PLAIN_TYPE,
    title: str = "",
    errors: Iterable[Complaint] = (),
    headers: Mapping[str, str] | None = None,
) -> Response:
    problem = Problem(
        type=type,
        title=title or HTTPStatus(status).phrase,
        status=status,
        detail=detail,
        instance=quote(path),
        errors=[Note(field=one.field, problem=one.problem, mend=one.mend) for one in errors],
    )
    # In ASCII: a text of the client's that is repeated may hold half of a surrogate pair, which UTF-8 has not.
    return Response(json.dumps(problem.model_dump()), status, headers, MEDIA_TYPE)


def add_handlers(app: FastAPI) -> None:
    app.add_exception_handler(ClientDisconnect, _client_gone)
    app.add_exception_handler(HeadraceError, _headrace_error)
    app.add_exception_handler(HTTPException, _http_error)
    app.add_exception_handler(RequestValidationError, _parameter_error)


async def _headrace_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HeadraceError)
    kind = next(kind for kind in KINDS if isinstance(error, kind.error))
    return problem_reply(
        request.scope["path"], kind.status, str(error), type=kind.type, title=kind.title, errors=error.complaints
    )


async def _client_gone(request: Request, _error: Exception) -> Response:
    return problem_reply(request.scope["path"], 400, "the client left before its body was complete")


async def _http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    return problem_reply(request.scope["path"], error.status_code, str(error.detail), headers=error.headers)


async def _parameter_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    described = request.app.openapi()["paths"][request.scope["route"].path][request.method.lower()]
    schemas = request.app.openapi()["components"]["schemas"]
    found = [
        Complaint(
            field=".".join(map(str, one["loc"])),
            problem=str(one["msg"]),
            mend=mend_of(described, schemas, one["type"], one["loc"]),
        )
        for one in error.errors()
    ]
    return problem_reply(
        request.scope["path"],
        422,
        "; ".join(map(str, found)),
        type=INVALID_REQUEST,
        title="Invalid request",
        errors=found,
    )
