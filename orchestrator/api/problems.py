"""Errors as problem details (RFC 9457): their wire model, and the handlers that answer so. `problem_kinds.py` says
which error of ours is which problem; `server.py` hangs the handlers into the app; `guard.py` answers so as well."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
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
from orchestrator.api.problem_kinds import MEDIA_TYPE, kind_of
from orchestrator.api.wire import Note, WireModel
from orchestrator.errors import Complaint, HeadraceError

PLAIN_TYPE = "about:blank"
"""RFC 9457: the status says it all."""


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
    kind = kind_of(error)
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
