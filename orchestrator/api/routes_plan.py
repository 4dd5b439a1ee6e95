"""`/validate` and `/render`: what would become of a job file. Nothing is recorded or started."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request, Response
from fastapi.concurrency import run_in_threadpool

from orchestrator.api.examples import PLAN
from orchestrator.api.job_file import IN_DOCUMENT, job_file
from orchestrator.api.problem_kinds import UnknownBodyType, UnreadableBody
from orchestrator.api.problems import declared
from orchestrator.api.schemas import Verdict, verdict
from orchestrator.errors import SpecError
from orchestrator.plan.shown import shown_plan
from orchestrator.plan.types import Finding, JobPlan, plan_to_json
from orchestrator.service import JobService

_PLAN: dict[int | str, dict[str, Any]] = {200: {"model": JobPlan, "content": {"application/json": {"example": PLAN}}}}


def plan_routes(service: JobService) -> APIRouter:
    routes = APIRouter(tags=["plans"], responses=declared(415))

    @routes.post("/validate", openapi_extra=IN_DOCUMENT)
    async def validate_job(request: Request) -> Verdict:
        """Whether a job could be started now: all that is wrong with its job file, not only the first."""
        try:
            spec = await job_file(request)
        except (UnknownBodyType, UnreadableBody):
            raise
        except SpecError as error:
            return verdict([Finding(severity="error", **vars(complaint)) for complaint in error.complaints])
        return verdict(await run_in_threadpool(service.findings, spec))

    @routes.post("/render", responses=_PLAN, openapi_extra=IN_DOCUMENT)
    async def render_job(request: Request) -> Response:
        """The whole plan, every generated file included, as `headrace render --json` shows it: without secrets. Errors
        among its findings would keep it from being started."""
        plan = await run_in_threadpool(service.plan, await job_file(request))
        return Response(plan_to_json(shown_plan(plan)), media_type="application/json")

    return routes
