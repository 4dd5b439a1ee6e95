"""`/events` and `/jobs/{name}/events`: what happened, as pages behind a cursor and as a stream of Server-Sent Events.

A stream asks the state file for its next page when the one before has been sent: a slow reader costs one page of
memory, and what other processes write is seen as well. It ends when the server is told to.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Annotated, Any

import anyio
from fastapi import APIRouter, Header, Query
from fastapi.concurrency import run_in_threadpool
from sse_starlette import EventSourceResponse, ServerSentEvent

from orchestrator.api.event_schemas import EventList, event_list, event_status
from orchestrator.api.examples import EVENT_STREAM
from orchestrator.api.pages import NUMBERS_END, PAGE, Limit
from orchestrator.api.problems import declared
from orchestrator.store.jobs import JobStore

LOOK_EVERY_S = 0.3
BEATS_EVERY_S = 15
"""Proxies close what is silent for longer."""
ENDS_WITHIN_S = 2.0
"""Once the server is told to end; then a reader that stands still is cut off."""

Cursor = Annotated[int | None, Query(ge=0, lt=NUMBERS_END, description="Only events behind this `seq`.")]
LastEventId = Annotated[
    int | None,
    Header(ge=0, lt=NUMBERS_END, description="As browsers send it when they connect again; stronger than `since`."),
]


def stream_of(what: str, example: str) -> dict[int | str, dict[str, Any]]:
    """For the `responses` of a route whose answer is a stream."""
    content = {"text/event-stream": {"schema": {"type": "string"}, "example": example}}
    return {200: {"description": f"Server-Sent Events. {what}", "content": content}}


_STREAM = stream_of("`id` is the event's `seq`, `data` the event as JSON.", EVENT_STREAM)


def event_routes(store: JobStore) -> APIRouter:
    routes = APIRouter(tags=["events"])

    @routes.get("/events")
    async def list_events(since: Cursor = None, limit: Limit = PAGE) -> EventList:
        """Events of all jobs, the oldest first: the first ones behind `since`, the newest where it is not given."""
        return await run_in_threadpool(_page, store, None, since, limit)

    @routes.get("/events/stream", response_class=EventSourceResponse, responses=_STREAM)
    async def stream_events(since: Cursor = None, last_event_id: LastEventId = None) -> EventSourceResponse:
        """Events of all jobs as they happen: those behind the cursor, from now on where none is given."""
        return await _stream(store, None, since if last_event_id is None else last_event_id)

    @routes.get("/jobs/{name}/events", responses=declared(404))
    async def list_job_events(name: str, since: Cursor = None, limit: Limit = PAGE) -> EventList:
        """Events of a job and of its earlier runs, as `/events` has them."""
        await run_in_threadpool(store.get, name)
        return await run_in_threadpool(_page, store, name, since, limit)

    @routes.get(
        "/jobs/{name}/events/stream", response_class=EventSourceResponse, responses={**_STREAM, **declared(404)}
    )
    async def stream_job_events(
        name: str, since: Cursor = None, last_event_id: LastEventId = None
    ) -> EventSourceResponse:
        """Events of a job as they happen, as `/events/stream` has them."""
        await run_in_threadpool(store.get, name)
        return await _stream(store, name, since if last_event_id is None else last_event_id)

    return routes


def _page(store: JobStore, job: str | None, since: int | None, limit: int) -> EventList:
    if since is None:
        return event_list(store.events.newest(limit, job), 0)
    return event_list(store.events.since(since, limit, job), since)


async def _stream(store: JobStore, job: str | None, since: int | None) -> EventSourceResponse:
    seq = since if since is not None else await run_in_threadpool(store.events.newest_seq)
    ending = anyio.Event()
    return event_source(_follow(store, job, seq, ending), ending)


def event_source(events: AsyncIterator[ServerSentEvent], ending: anyio.Event) -> EventSourceResponse:
    """A stream that beats, and whose `ending` is set when the server is told to end."""
    return EventSourceResponse(
        events,
        ping=BEATS_EVERY_S,
        shutdown_event=ending,
        shutdown_grace_period=ENDS_WITHIN_S,
    )


async def _follow(store: JobStore, job: str | None, seq: int, ending: anyio.Event) -> AsyncIterator[ServerSentEvent]:
    while not ending.is_set():
        page = await run_in_threadpool(store.events.since, seq, PAGE, job)
        for each in page:
            seq = each.seq
            yield ServerSentEvent(event_status(each).model_dump_json(), id=str(seq))
        if not page:
            with anyio.move_on_after(LOOK_EVERY_S):
                await ending.wait()
