"""Builds the control API's app from a ready service: routes, and one shape for every error."""

from __future__ import annotations

import base64
import logging
import secrets
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager

from fastapi import FastAPI, Request
from fastapi.concurrency import run_in_threadpool
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from orchestrator.api.routes_job import BodyTooLarge, UnknownBodyType, UnreadableBody, job_routes, resume_starts
from orchestrator.api.routes_rlhf import rlhf_routes
from orchestrator.api.routes_weights import weight_routes
from orchestrator.api.schemas import ErrorBody, ErrorReply, Note, notes
from orchestrator.audit_rounds import AuditRounds
from orchestrator.errors import (
    AuditFailed,
    HeadraceError,
    JobExists,
    JobUnknown,
    PlanRefused,
    SpecError,
    Unsupported,
    UpdateFailed,
    UpdateRefused,
    UpdateUnended,
    UpdateUnknown,
)
from orchestrator.service import JobService
from orchestrator.store.jobs import PortsReserved
from orchestrator.supervision import supervise_all
from orchestrator.weights.audit import audit_kept

_LOG = logging.getLogger(__name__)
OPEN_PATHS = ("/health",)
STATUS_OF: tuple[tuple[type[HeadraceError], int], ...] = (
    (BodyTooLarge, 413),
    (UnknownBodyType, 415),
    (UnreadableBody, 400),
    (SpecError, 422),
    (PlanRefused, 422),
    (Unsupported, 422),
    (JobUnknown, 404),
    (UpdateUnknown, 404),
    (JobExists, 409),
    (UpdateRefused, 409),
    (PortsReserved, 409),
    (UpdateFailed, 500),
    (AuditFailed, 503),
    (UpdateUnended, 504),
)
"""The first that fits counts; any other error of ours is a 500 with its text."""


def build_app(service: JobService, token: str | None) -> FastAPI:
    """The app. Every route but /health asks for `token` as a bearer token; None asks for nothing (tests only)."""

    @asynccontextmanager
    async def lifespan(_app: FastAPI) -> AsyncIterator[None]:
        resume_starts(service)
        stopping = threading.Event()
        supervising = threading.Thread(target=supervise_all, args=(service.weights.supervision, stopping))
        supervising.start()
        # Not waited for: a replay may take as long as a request, and leaves nothing that has to be cleared up.
        rounds = AuditRounds(service.store, audit_kept)
        threading.Thread(target=rounds.keep, args=(stopping,), name="audits", daemon=True).start()
        yield
        stopping.set()
        await run_in_threadpool(supervising.join)

    app = FastAPI(title="Headrace control API", version="1", lifespan=lifespan)

    @app.middleware("http")
    async def guard(request: Request, go_on: Callable[[Request], Awaitable[Response]]) -> Response:
        given = _given_token(request.headers.get("authorization", ""))
        is_open = token is None or request.url.path in OPEN_PATHS
        if not is_open and not secrets.compare_digest(given, str(token).encode()):
            message = "give the API token as a bearer token in the Authorization header"
            return _reply(401, message, headers={"www-authenticate": "Bearer"})
        try:
            return await go_on(request)
        except Exception as error:
            # An exception that reached the server would have it drop the connection.
            _LOG.exception("%s %s", request.method, request.url.path)
            return _reply(500, f"unexpected {type(error).__name__}; the log of `headrace serve` says more")

    @app.get("/health", tags=["control plane"])
    async def health() -> dict[str, str]:
        return {"status": "ok"}

    app.include_router(job_routes(service))
    app.include_router(weight_routes(service.weights))
    app.include_router(rlhf_routes(service.weights))
    app.add_exception_handler(ClientDisconnect, _client_gone)
    app.add_exception_handler(HeadraceError, _headrace_error)
    app.add_exception_handler(HTTPException, _http_error)
    app.add_exception_handler(RequestValidationError, _parameter_error)
    return app


def _given_token(authorization: str) -> bytes:
    """A bearer token; or the password of a URL, which is all that vLLM's weight sync client can be given."""
    scheme, _, given = authorization.partition(" ")
    if scheme.lower() == "bearer":
        return given.strip().encode()
    try:
        return base64.b64decode(given, validate=True).partition(b":")[2] if scheme.lower() == "basic" else b""
    except ValueError:
        return b""


async def _headrace_error(_request: Request, error: Exception) -> Response:
    status = next((status for kind, status in STATUS_OF if isinstance(error, kind)), 500)
    complaints = error.complaints if isinstance(error, SpecError | PlanRefused) else ()
    return _reply(status, str(error), notes(complaints))


async def _client_gone(_request: Request, _error: Exception) -> Response:
    return _reply(400, "the client left before its body was complete")


async def _http_error(_request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    return _reply(error.status_code, str(error.detail), headers=error.headers)


async def _parameter_error(_request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    listed = "; ".join(f"{'.'.join(map(str, one['loc']))}: {one['msg']}" for one in error.errors())
    return _reply(422, listed)


def _reply(
    status: int, message: str, complaints: list[Note] | None = None, headers: Mapping[str, str] | None = None
) -> Response:
    body = ErrorReply(error=ErrorBody(message=message, complaints=complaints or []))
    return JSONResponse(body.model_dump(), status_code=status, headers=headers)
