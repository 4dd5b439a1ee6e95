"""`/jobs/{name}/logs/{process}`: the end of a process's log, and what is added to it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable, Iterator
from typing import Annotated, Any

from fastapi import APIRouter, Query, Request
from fastapi.concurrency import iterate_in_threadpool, run_in_threadpool
from fastapi.responses import PlainTextResponse, Response, StreamingResponse

from deploy.logs import LogReader, tail
from orchestrator.api.pages import MOST_LOG_LINES
from orchestrator.api.problems import declared
from orchestrator.store.jobs import JobStore
from orchestrator.store.records import ENDED, StoredJob

LOOK_EVERY_S = 0.5
CHUNK_CHARS = 64 * 1024
_TEXT: dict[int | str, dict[str, Any]] = {
    200: {"content": {"text/plain": {"schema": {"type": "string"}, "example": "INFO: Application startup complete.\n"}}}
}


def log_routes(store: JobStore) -> APIRouter:
    routes = APIRouter(tags=["jobs"], responses=declared(404))

    @routes.get("/jobs/{name}/logs/{process}", response_class=PlainTextResponse, responses=_TEXT)
    async def show_logs(
        request: Request,
        name: str,
        process: str,
        tail_lines: Annotated[int, Query(alias="tail", ge=0, le=MOST_LOG_LINES)] = 100,
        follow: Annotated[bool, Query()] = False,
    ) -> Response:
        """The last lines of a process's log; with `follow` also new ones as they come, until the job ends. Empty where
        it has not been started."""
        job = await run_in_threadpool(store.get, name)
        path = job.log_of(process)
        if follow:
            lines = _follow(request, store, job, LogReader(path, tail_lines))
            return StreamingResponse(lines, media_type="text/plain; charset=utf-8")
        return PlainTextResponse("".join(f"{line}\n" for line in await run_in_threadpool(tail, path, tail_lines)))

    return routes


async def _follow(request: Request, store: JobStore, job: StoredJob, reader: LogReader) -> AsyncIterator[str]:
    """One look is sent before the next: a client that reads slowly holds up nobody, and nothing heaps up for it."""
    has_ended = False
    while not has_ended and not await request.is_disconnected():
        # Asked first: what was written until then is still given.
        has_ended = await run_in_threadpool(_has_ended, store, job)
        async for chunk in iterate_in_threadpool(_chunks(reader.new_lines())):
            yield chunk
        if not has_ended:
            await asyncio.sleep(LOOK_EVERY_S)
    for line in reader.rest():
        yield line


def _has_ended(store: JobStore, job: StoredJob) -> bool:
    now = store.find(job.name)
    return now is None or now.run_id != job.run_id or now.phase in ENDED


def _chunks(lines: Iterable[str]) -> Iterator[str]:
    """A hop between threads for each line would cost more than the line."""
    chunk, chars = [], 0
    for line in lines:
        chunk.append(f"{line}\n")
        chars += len(line)
        if chars >= CHUNK_CHARS:
            yield "".join(chunk)
            chunk, chars = [], 0
    if chunk:
        yield "".join(chunk)
