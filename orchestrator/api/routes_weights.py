"""`/jobs/{name}/weights`: push new weights, cancel that, and look at what a job serves and how its updates went."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Path, Response
from fastapi.concurrency import run_in_threadpool

from orchestrator.api.operation_schemas import BEGUN, point_to
from orchestrator.api.pages import NUMBERS_END, PAGE, Limit
from orchestrator.api.problems import declared
from orchestrator.api.weight_schemas import (
    PushBody,
    UpdateList,
    UpdateStatus,
    WeightsStatus,
    update_list,
    update_status,
    weights_status,
)
from orchestrator.weight_service import PushOptions, WeightService

UpdateNumber = Annotated[int, Path(ge=1, lt=NUMBERS_END)]


def weight_routes(weights: WeightService) -> APIRouter:
    routes = APIRouter(prefix="/jobs/{name}/weights", tags=["weights"], responses=declared(404))

    @routes.post("", status_code=202, responses=BEGUN)
    async def push_weights(name: str, body: PushBody, response: Response) -> UpdateStatus:
        """Bring a version to all engines of a job. Answers once it is noted; `GET .../updates/{number}` says how it
        went."""
        options = PushOptions(strategy=body.strategy, in_flight=body.in_flight, load_mode=body.load_mode)
        status = update_status(await run_in_threadpool(weights.push, name, body.version, body.source, options))
        point_to(response, status.operation)
        return status

    @routes.get("")
    async def show_weights(name: str) -> WeightsStatus:
        """What a job serves, and what is under way."""
        position = await run_in_threadpool(weights.position, name)
        return weights_status(position, await run_in_threadpool(weights.newest, name))

    @routes.get("/updates")
    async def list_updates(name: str, limit: Limit = PAGE) -> UpdateList:
        """How the newest updates went, and what happened to engines meanwhile."""
        records = await run_in_threadpool(weights.history, name, limit)
        return update_list(records, await run_in_threadpool(weights.remarks, name))

    @routes.get("/updates/{number}")
    async def show_update(name: str, number: UpdateNumber) -> UpdateStatus:
        return update_status(await run_in_threadpool(weights.record, name, number))

    @routes.delete("/updates/{number}", status_code=202, responses=BEGUN)
    async def cancel_update(name: str, number: UpdateNumber, response: Response) -> UpdateStatus:
        """Called off where no engine has begun to load, else rolled back; may be asked again. Answers once it is
        noted."""
        status = update_status(await run_in_threadpool(weights.cancel, name, number))
        point_to(response, status.operation)
        return status

    return routes
