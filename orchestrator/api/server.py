"""Builds the control API's app from a ready service."""

from __future__ import annotations

import threading
from collections.abc import AsyncIterator
from contextlib import AbstractContextManager, asynccontextmanager, nullcontext
from typing import Literal

from fastapi import FastAPI
from fastapi.concurrency import run_in_threadpool
from fastapi.routing import APIRoute

from orchestrator.all_jobs import AllJobs
from orchestrator.api.access import Access
from orchestrator.api.document import DocumentedApi
from orchestrator.api.guard import Guard
from orchestrator.api.long_calls import LongCalls
from orchestrator.api.problems import add_handlers, declared
from orchestrator.api.routes_events import event_routes
from orchestrator.api.routes_job import job_routes
from orchestrator.api.routes_logs import log_routes
from orchestrator.api.routes_operations import operation_routes
from orchestrator.api.routes_page import add_page
from orchestrator.api.routes_plan import plan_routes
from orchestrator.api.routes_replicas import replica_routes
from orchestrator.api.routes_rlhf import rlhf_routes
from orchestrator.api.routes_weights import weight_routes
from orchestrator.api.wire import WireModel
from orchestrator.audit_rounds import AuditRounds
from orchestrator.operation_service import OperationService
from orchestrator.service import JobService
from orchestrator.weights.audit import audit_kept

GUARDED = declared(400, 401, 403, 409, 413, 422, 500, 504)
"""What any route with a token may answer; 409 also where another version has recorded a job, 504 where the server ends
before it can answer."""


class Health(WireModel, json_schema_extra={"examples": [{"status": "ok"}]}):
    status: Literal["ok"]


def build_app(service: JobService, access: Access, announced: AbstractContextManager[None] | None = None) -> FastAPI:
    """The app. All but /health and the page's files asks for a token. `announced`: in which others of this machine find
    it."""

    @asynccontextmanager
    async def lifespan(_app: FastAPI) -> AsyncIterator[None]:
        with announced or nullcontext():
            stopping = threading.Event()
            keeping = threading.Thread(target=AllJobs(service, stopping).keep, name="jobs")
            keeping.start()
            # Not waited for: a replay may take as long as a request, and leaves nothing that has to be cleared up.
            rounds = AuditRounds(service.store, audit_kept)
            threading.Thread(target=rounds.keep, args=(stopping,), name="audits", daemon=True).start()
            try:
                yield
            finally:
                stopping.set()
                await run_in_threadpool(keeping.join)

    # Pages that a browser could not send a token for, made of scripts from elsewhere.
    app = DocumentedApi(
        title="Headrace control API",
        version="1",
        lifespan=lifespan,
        docs_url=None,
        redoc_url=None,
        generate_unique_id_function=_operation_id,
    )
    app.add_middleware(Guard, access=access)
    add_handlers(app)

    @app.get("/health", tags=["control plane"])
    async def show_health() -> Health:
        """Whether the control plane answers. Asks for no token."""
        return Health(status="ok")

    calls = LongCalls(service)
    for routes in (
        job_routes(service, calls),
        log_routes(service.store),
        plan_routes(service),
        weight_routes(service.weights),
        rlhf_routes(service.weights),
        event_routes(service.store),
        operation_routes(OperationService(service=service), calls),
    ):
        app.include_router(routes, responses=GUARDED)
    app.include_router(replica_routes(service.replicas), responses=GUARDED)
    add_page(app)
    return app


def _operation_id(route: APIRoute) -> str:
    """What generated clients call their functions."""
    return route.name
