"""`/jobs/{name}/rlhf/...`: vLLM's own weight routes for a whole job. `HTTPVLLMWeightSyncClient` drives the fleet with
them as if it were one engine.

Given the URL `http://any:TOKEN@HOST:PORT/jobs/NAME/rlhf`, its four calls become one push: `start` opens a session,
`update_weights` names the source, `finish` pushes it and answers when the fleet serves it. So the hold lasts as long as
the load and no longer, whatever the trainer does between its calls. A session lives in this process alone: after a
restart the trainer begins again.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from dataclasses import dataclass
from typing import Annotated, Any

from fastapi import APIRouter, Body
from fastapi.concurrency import run_in_threadpool

from orchestrator.api.examples import FINISHED, SOURCE
from orchestrator.api.problems import declared
from orchestrator.api.wire import OpenTable, WireModel
from orchestrator.errors import UpdateFailed, UpdateRefused, UpdateUnended
from orchestrator.weight_service import PushOptions, WeightService
from orchestrator.weights.journal import PushRecord

ANSWERS_WITHIN_S = 280.0
"""vLLM's client gives up after 300 s."""
LOOK_EVERY_S = 0.3

InitInfo = Annotated[OpenTable, Body(embed=True, examples=[{}])]
UpdateInfo = Annotated[OpenTable | list[OpenTable], Body(embed=True, examples=[{"source": SOURCE}])]
VersionName = Annotated[str | None, Body(embed=True, examples=["step-200"])]


class Done(WireModel, json_schema_extra={"examples": [{"message": "Weight update started"}]}):
    message: str


class Finished(WireModel, json_schema_extra={"examples": [FINISHED]}):
    message: str
    weight_version: str
    update: int
    """Its number under /jobs/{name}/weights/updates."""


class WeightInfo(WireModel, json_schema_extra={"examples": [{"weight_version": "step-200"}]}):
    weight_version: str | None
    """None before the job has come up."""


@dataclass
class Session:
    """Between a trainer's `start` and its `finish`."""

    source: dict[str, Any] | None = None


class RlhfSessions:
    """One per job."""

    def __init__(self, weights: WeightService) -> None:
        self._weights = weights
        self._open: dict[str, Session] = {}

    def init(self, name: str, init_info: dict[str, Any]) -> None:
        """Engines of ours find each source by itself: there is nothing to set up."""
        self._weights.updatable(name)
        if init_info:
            raise UpdateRefused(f"init_info: engines of job {name!r} need none, and got {sorted(init_info)}")

    def start(self, name: str) -> None:
        """One that was started and never finished gives way."""
        self._weights.updatable(name)
        self._open[name] = Session()

    def update(self, name: str, update_info: dict[str, Any] | list[dict[str, Any]]) -> None:
        infos = update_info if isinstance(update_info, list) else [update_info]
        session = self._session(name)
        if session.source is not None or len(infos) != 1 or not isinstance(infos[0].get("source"), dict):
            raise UpdateRefused('update_info: one per version, {"source": ...} as a publisher gives it')
        session.source = infos[0]["source"]

    def push(self, name: str, version: str | None) -> PushRecord:
        """What the session has named."""
        session = self._session(name)
        source = session.source
        if source is None:
            raise UpdateRefused("no source was named: call update_weights between start and finish")
        version = version or source.get("version") or f"update-{secrets.token_hex(6)}"
        record = self._weights.push(name, version, source, PushOptions())
        # A trainer that gave up waiting and began again has another one by now.
        if self._open.get(name) is session:
            del self._open[name]
        return record

    async def finish(self, name: str, version: str | None) -> Finished:
        """Raises `UpdateFailed` where the fleet does not serve it, and `UpdateUnended` where that is not known yet."""
        record = await run_in_threadpool(self.push, name, version)
        deadline = time.monotonic() + ANSWERS_WITHIN_S
        while record.outcome is None and time.monotonic() < deadline:
            await asyncio.sleep(LOOK_EVERY_S)
            record = await run_in_threadpool(self._weights.record, name, record.number)
        return _finished(record)

    def end(self, name: str) -> None:
        self._open.pop(name, None)

    def _session(self, name: str) -> Session:
        if name not in self._open:
            raise UpdateRefused(f"no update of job {name!r} was started here: call start_weight_update first")
        return self._open[name]


def _finished(record: PushRecord) -> Finished:
    number, version = record.number, record.push.version
    if record.outcome is None:
        text = f"update {number} to {version!r} has not ended within {ANSWERS_WITHIN_S:.0f} s, and goes on"
        raise UpdateUnended(f"{text}; GET /jobs/{record.job}/weights/updates/{number} says how it ends")
    if record.outcome != "committed":
        raise UpdateFailed(f"update {number} to {version!r} was {record.outcome}: {record.why}")
    return Finished(message="Weight update finished", weight_version=version, update=number)


def rlhf_routes(weights: WeightService) -> APIRouter:
    routes = APIRouter(prefix="/jobs/{name}/rlhf", tags=["vLLM's weight routes"], responses=declared(404))
    sessions = RlhfSessions(weights)

    @routes.post("/init_weight_transfer_engine")
    async def init_weight_transfer_engine(name: str, init_info: InitInfo) -> Done:
        await run_in_threadpool(sessions.init, name, init_info)
        return Done(message="Weight transfer initialized")

    @routes.post("/start_weight_update")
    async def start_weight_update(name: str) -> Done:
        await run_in_threadpool(sessions.start, name)
        return Done(message="Weight update started")

    @routes.post("/update_weights")
    async def update_weights(
        name: str,
        update_info: UpdateInfo,
    ) -> Done:
        sessions.update(name, update_info)
        return Done(message="Weights updated")

    @routes.post("/finish_weight_update")
    async def finish_weight_update(name: str, weight_version: VersionName = None) -> Finished:
        return await sessions.finish(name, weight_version)

    @routes.post("/shutdown_weight_transfer_engine")
    async def shutdown_weight_transfer_engine(name: str) -> Done:
        sessions.end(name)
        return Done(message="Weight transfer shut down")

    @routes.get("/weight_info")
    async def weight_info(name: str) -> WeightInfo:
        position = await run_in_threadpool(weights.position, name)
        return WeightInfo(weight_version=None if position is None else position.committed.version)

    return routes
