"""The OpenAPI document is whole: problems, examples and tokens stand in it, and its examples are true."""

from __future__ import annotations

import tomllib
from collections.abc import Iterator
from typing import Any

import pytest
from pydantic import BaseModel

from orchestrator.api import examples
from orchestrator.api.access import Access
from orchestrator.api.audit_schemas import AuditStatus
from orchestrator.api.event_schemas import EventList, EventStatus
from orchestrator.api.problem_kinds import MEDIA_TYPE
from orchestrator.api.problems import Problem
from orchestrator.api.routes_rlhf import Finished
from orchestrator.api.schemas import JobList, JobStatus
from orchestrator.api.server import build_app
from orchestrator.api.traffic_schemas import TRAFFIC, TrafficStatus
from orchestrator.api.weight_schemas import PushBody, UpdateList, UpdateStatus, WeightsStatus
from tests.fakes.fake_launch import FakeFleet
from tests.unit.orchestrator.samples import spec_of


@pytest.fixture(scope="module")
def document(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return build_app(FakeFleet(tmp_path_factory.mktemp("home")).service(), Access({})).openapi()


def operations(document: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            yield f"{method.upper()} {path}", operation


def has_example(content: dict[str, Any], document: dict[str, Any]) -> bool:
    schema = content["schema"]
    if "$ref" in schema:
        schema = document["components"]["schemas"][schema["$ref"].rpartition("/")[2]]
    of_fields = [field.get("examples") for field in schema.get("properties", {}).values()]
    return bool("example" in content or schema.get("examples") or (of_fields and all(of_fields)))


def test_bodies_and_answers_have_examples(document: dict[str, Any]) -> None:
    lacking = []
    for name, operation in operations(document):
        answers = [reply for code, reply in operation["responses"].items() if code < "3"]
        for carried in (operation.get("requestBody", {}), *answers):
            lacking += [
                f"{name}: {kind}" for kind, one in carried.get("content", {}).items() if not has_example(one, document)
            ]
    assert lacking == []


def test_every_route_says_which_problems_it_answers_with(document: dict[str, Any]) -> None:
    for name, operation in operations(document):
        problems = {code: reply for code, reply in operation["responses"].items() if code >= "4"}
        assert name.endswith("/health") or {"401", "422", "500"} <= set(problems), name
        assert ("{name}" in name) <= ("404" in problems), name
        assert all(list(reply["content"]) == [MEDIA_TYPE] for reply in problems.values()), name


def test_tokens_are_asked_for_everywhere_but_at_the_health_route(document: dict[str, Any]) -> None:
    assert document["security"] == [{"bearer": []}, {"password": []}]
    assert [name for name, operation in operations(document) if "security" in operation] == ["GET /health"]


@pytest.mark.parametrize(
    ("model", "example"),
    [
        (Problem, examples.PROBLEM),
        (JobStatus, examples.JOB),
        (JobList, examples.JOBS),
        (EventStatus, examples.EVENT),
        (EventList, examples.EVENTS),
        (UpdateStatus, examples.UPDATE),
        (UpdateList, examples.UPDATES),
        (WeightsStatus, examples.WEIGHTS),
        (AuditStatus, examples.AUDIT),
        (PushBody, examples.PUSH),
        (Finished, examples.FINISHED),
        (TrafficStatus, TRAFFIC),
    ],
)
def test_examples_are_true(model: type[BaseModel], example: dict[str, Any]) -> None:
    assert model.model_validate(example).model_dump(mode="json", exclude_unset=True) == example


def test_job_files_of_the_document_can_be_used() -> None:
    assert spec_of(examples.JOB_FILE).name == "demo"
    assert spec_of(tomllib.loads(examples.JOB_FILE_TOML)).name == "demo"
