"""Builds the control API's app from a ready service: routes, and one shape for every error."""

from __future__ import annotations

import secrets
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response
from starlette.exceptions import HTTPException

from orchestrator.api.routes_job import job_routes, resume_starts
from orchestrator.api.schemas import ErrorBody, ErrorReply, Note, notes
from orchestrator.errors import HeadraceError, JobExists, JobUnknown, PlanRefused, SpecError, Unsupported
from orchestrator.service import JobService

OPEN_PATHS = ("/health",)
STATUS_OF: tuple[tuple[type[HeadraceError], int], ...] = ((JobUnknown, 404), (JobExists, 409), (Unsupported, 422))


def build_app(service: JobService, token: str | None) -> FastAPI:
    """The app. With a `token`, every route but /health asks for it as a bearer token."""

    @asynccontextmanager
    async def lifespan(_app: FastAPI) -> AsyncIterator[None]:
        resume_starts(service)
        yield

    app = FastAPI(title="Headrace control API", version="1", lifespan=lifespan)

    @app.middleware("http")
    async def ask_for_token(request: Request, go_on: Callable[[Request], Awaitable[Response]]) -> Response:
        if token is not None and request.url.path not in OPEN_PATHS:
            given = request.headers.get("authorization", "").encode()
            if not secrets.compare_digest(given, f"Bearer {token}".encode()):
                return _reply(401, "give the API token as a bearer token in the Authorization header")
        return await go_on(request)

    @app.get("/health", tags=["control plane"])
    async def health() -> dict[str, str]:
        return {"status": "ok"}

    app.include_router(job_routes(service))
    app.add_exception_handler(HeadraceError, _headrace_error)
    app.add_exception_handler(HTTPException, _http_error)
    app.add_exception_handler(RequestValidationError, _parameter_error)
    return app


async def _headrace_error(_request: Request, error: Exception) -> Response:
    if isinstance(error, SpecError):
        syntax = any(one.field in ("syntax", "body") for one in error.complaints)
        return _reply(400 if syntax else 422, str(error), notes(error.complaints))
    if isinstance(error, PlanRefused):
        return _reply(422, str(error), notes(error.complaints))
    return _reply(next((status for kind, status in STATUS_OF if isinstance(error, kind)), 500), str(error))


async def _http_error(_request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    return _reply(error.status_code, str(error.detail))


async def _parameter_error(_request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    listed = "; ".join(f"{'.'.join(map(str, one['loc']))}: {one['msg']}" for one in error.errors())
    return _reply(422, listed)


def _reply(status: int, message: str, complaints: list[Note] | None = None) -> Response:
    body = ErrorReply(error=ErrorBody(message=message, complaints=complaints or []))
    return JSONResponse(body.model_dump(), status_code=status)
