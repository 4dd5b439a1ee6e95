"""Restarts and drains of single processes of a job, and how many replicas a role has. A handler parses, makes one call
of the service, and answers."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Path, Response
from fastapi.concurrency import run_in_threadpool

from connectors.types import Role
from orchestrator.api.operation_schemas import BEGUN, point_to
from orchestrator.api.pages import NUMBERS_END, PAGE, Limit
from orchestrator.api.problems import declared
from orchestrator.api.replica_schemas import (
    LeaveBody,
    RequestList,
    RequestStatus,
    ScaleBody,
    request_list,
    request_status,
)
from orchestrator.replica_service import ReplicaService
from orchestrator.store.keeping import ReplicaRequest

UNFORCED = LeaveBody()
RequestNumber = Annotated[int, Path(ge=1, lt=NUMBERS_END)]


def replica_routes(replicas: ReplicaService) -> APIRouter:
    routes = APIRouter(prefix="/jobs/{name}", tags=["replicas"], responses=declared(404))

    @routes.post("/processes/{process}/restart", status_code=202, responses=BEGUN)
    async def restart_process(name: str, process: str, response: Response, body: LeaveBody = UNFORCED) -> RequestStatus:
        """Start a process again; an engine's requests run out first, and its sessions move. Answers once it is noted;
        `GET .../requests/{number}` says how it went."""
        return _begun(response, await run_in_threadpool(replicas.restart, name, process, force=body.force))

    @routes.post("/replicas/{replica}/drain", status_code=202, responses=BEGUN)
    async def drain_replica(name: str, replica: str, response: Response, body: LeaveBody = UNFORCED) -> RequestStatus:
        """Send an engine no more requests, and no new weights, until it is undrained."""
        return _begun(response, await run_in_threadpool(replicas.drain, name, replica, force=body.force))

    @routes.post("/roles/{role}/scale", status_code=202, responses=BEGUN)
    async def scale_role(name: str, role: Role, body: ScaleBody, response: Response) -> RequestStatus:
        """Give a role another number of replicas. New ones get requests once they have what the job serves; the last
        ones leave first: they are drained, and their sessions move."""
        return _begun(response, await run_in_threadpool(replicas.scale, name, role, body.replicas, force=body.force))

    @routes.post("/replicas/{replica}/undrain", status_code=202, responses=BEGUN)
    async def undrain_replica(name: str, replica: str, response: Response) -> RequestStatus:
        """Bring a drained engine to what the job serves, and send it requests again."""
        return _begun(response, await run_in_threadpool(replicas.undrain, name, replica))

    @routes.get("/requests")
    async def list_requests(name: str, limit: Limit = PAGE) -> RequestList:
        """What was asked of single processes last, and what came of it."""
        return request_list(await run_in_threadpool(replicas.requests, name, limit))

    @routes.get("/requests/{number}")
    async def show_request(name: str, number: RequestNumber) -> RequestStatus:
        return request_status(await run_in_threadpool(replicas.request, name, number))

    return routes


def _begun(response: Response, request: ReplicaRequest) -> RequestStatus:
    status = request_status(request)
    point_to(response, status.operation)
    return status
