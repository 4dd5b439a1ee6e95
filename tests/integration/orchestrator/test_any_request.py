"""Requests made up from the OpenAPI document, those that fit it and those that do not, against a running control plane:
none is answered with a 5xx, and all answers are as the document says."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from hypothesis.errors import Unsatisfiable
from schemathesis.checks import not_a_server_error
from schemathesis.generation import GenerationMode
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from tests.integration.orchestrator.control_plane import RunningControlPlane, running_control_plane

CHECKS = [
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
]
PER_ROUTE, PER_ROUTE_FULL = 14, 600
LEAST_FULL = 10_000


@pytest.fixture(scope="module")
def control_plane(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningControlPlane]:
    folder = tmp_path_factory.mktemp("control-plane")
    with running_control_plane(folder, {"HEADRACE_API_TOKEN": "a-known-token"}) as running:
        yield running


@pytest.fixture(scope="module")
def document(control_plane: RunningControlPlane) -> Any:
    schema = schemathesis.openapi.from_url(f"{control_plane.url}/openapi.json", headers=control_plane.headers)
    schema.config.generation.update(modes=list(GenerationMode))
    # They never end; tests of their own follow them.
    return schema.exclude(path_regex="/stream$")


def ask_anything(document: Any, headers: dict[str, str], per_route: int) -> int:
    """So many made-up requests for each route, at most. Returns how many were sent."""
    sent = 0
    for found in document.get_all_operations():
        operation = found.ok()
        for mode in GenerationMode:

            @settings(
                max_examples=per_route // 2,
                deadline=None,
                database=None,
                phases=[Phase.explicit, Phase.generate],
                suppress_health_check=list(HealthCheck),
            )
            @given(case=operation.as_strategy(generation_mode=mode), of_demo=st.booleans())
            def ask(case: Any, of_demo: bool) -> None:
                nonlocal sent
                sent += 1
                if of_demo and "name" in case.path_parameters:
                    # The job of the document's examples: made-up names are those of no job.
                    case.path_parameters["name"] = "demo"
                case.call_and_validate(headers=headers, checks=CHECKS, timeout=30)

            # A route that takes nothing cannot be asked wrongly.
            with suppress(Unsatisfiable):
                ask()
    return sent


def test_any_request(document: Any, control_plane: RunningControlPlane) -> None:
    assert ask_anything(document, control_plane.headers, PER_ROUTE) > 0


@pytest.mark.full
@pytest.mark.timeout(3600)
def test_ten_thousand_requests(document: Any, control_plane: RunningControlPlane) -> None:
    sent = ask_anything(document, control_plane.headers, PER_ROUTE_FULL)
    print(f"{sent} requests")
    assert sent >= LEAST_FULL
