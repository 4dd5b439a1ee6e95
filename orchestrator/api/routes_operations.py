"""`/operations`: what was asked for and takes a while, to be polled, followed and cancelled."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Annotated

import anyio
from fastapi import APIRouter, Path, Query, Response
from fastapi.concurrency import run_in_threadpool
from sse_starlette import EventSourceResponse, ServerSentEvent

from orchestrator.api import routes_events
from orchestrator.api.examples import OPERATION, OPERATION_STREAM
from orchestrator.api.long_calls import LongCalls
from orchestrator.api.operation_schemas import (
    BEGUN,
    OperationList,
    OperationStatus,
    operation_list,
    operation_status,
    point_to,
)
from orchestrator.api.pages import PAGE, Limit
from orchestrator.api.problems import declared
from orchestrator.errors import OperationUnknown
from orchestrator.operation_service import OperationService
from orchestrator.operations import Operation, OperationState

Id = Annotated[str, Path(description="As a 202 answer names it.", examples=[OPERATION["id"]])]
OfJob = Annotated[str | None, Query(description="Only those of this job.")]
InState = Annotated[OperationState | None, Query(description="Only those in this state.")]


def operation_routes(operations: OperationService, calls: LongCalls) -> APIRouter:
    routes = APIRouter(prefix="/operations", tags=["operations"], responses=declared(404))

    @routes.get("")
    async def list_operations(job: OfJob = None, state: InState = None, limit: Limit = PAGE) -> OperationList:
        """Starts, stops, updates, restarts, drains and scaled roles, the newest first: of runs that are recorded."""
        return operation_list(await run_in_threadpool(operations.newest, job, state, limit))

    @routes.get("/{operation}")
    async def show_operation(operation: Id) -> OperationStatus:
        return operation_status(await run_in_threadpool(operations.get, operation))

    @routes.get(
        "/{operation}/events",
        response_class=EventSourceResponse,
        responses=routes_events.stream_of("The operation as JSON, each time that it has changed.", OPERATION_STREAM),
    )
    async def follow_operation(operation: Id) -> EventSourceResponse:
        """The operation as it is, and each change until it has ended; then the stream ends. A browser's EventSource
        would connect again: close it when the state is an end."""
        found = await run_in_threadpool(operations.get, operation)
        ending = anyio.Event()
        return routes_events.event_source(_changes(operations, found, ending), ending)

    @routes.post("/{operation}/cancel", status_code=202, responses=BEGUN)
    async def cancel_operation(operation: Id, response: Response) -> OperationStatus:
        """A start: the job is stopped. An update: called off, or rolled back. A request that was not begun: withdrawn.
        Answers once it is noted; may be asked again until it has ended."""
        found = await run_in_threadpool(operations.cancel, operation)
        if found.id.record == "start":
            calls.end(replace(found.id, record="stop"))
        point_to(response, operation)
        return operation_status(found)

    return routes


async def _changes(
    operations: OperationService, found: Operation, ending: anyio.Event
) -> AsyncIterator[ServerSentEvent]:
    sent: Operation | None = None
    while not ending.is_set():
        if found != sent:
            yield ServerSentEvent(operation_status(found).model_dump_json())
            sent = found
        if found.has_ended:
            return
        with anyio.move_on_after(routes_events.LOOK_EVERY_S):
            await ending.wait()
        try:
            found = await run_in_threadpool(operations.get, str(found.id))
        except OperationUnknown:
            return
