"""The life of a real job over HTTP: by a client generated from the OpenAPI document, and by curl."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.e2e.harness import UP_TIMEOUT_S, Headrace, split_job
from tests.fleet.control import PORT, TOKEN, Control, control_plane
from tests.integration.orchestrator.generated_client import GeneratedLife, generated, live_with_curl

pytestmark = [pytest.mark.stack, pytest.mark.full, pytest.mark.timeout(3600)]

NAME = "by-clients"
ROUTER_PORT = 9436
URL = f"http://127.0.0.1:{PORT}"
WEIGHTS = {"transport": "path", "load_mode": "gpu_fetch"}


@pytest.fixture(scope="module")
def control(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Control]:
    headrace = Headrace(tmp_path_factory.mktemp("clients"))
    with control_plane(headrace, NAME) as control:
        yield control


def test_a_life_by_a_generated_client(control: Control, tiny_model: Path, tmp_path: Path) -> None:
    document = httpx.get(f"{URL}/openapi.json", headers={"authorization": f"Bearer {TOKEN}"}, trust_env=False).json()
    table = split_job(NAME, tiny_model, ROUTER_PORT, weights=WEIGHTS)
    with generated(document, tmp_path):
        states = GeneratedLife(url=URL, token=TOKEN, within_s=UP_TIMEOUT_S).live(table, str(tiny_model))
    assert states == ["succeeded"] * 6


def test_a_life_with_curl(control: Control, tiny_model: Path) -> None:
    job_file = control.headrace.write_job(split_job(NAME, tiny_model, ROUTER_PORT, weights=WEIGHTS))
    said = live_with_curl(job_file, URL, TOKEN, UP_TIMEOUT_S, PROMPT="Hello", CHECKPOINT=str(tiny_model))
    for line in (
        "start : succeeded",
        "== ask",
        "in epoch 2",
        "scale decode: succeeded",
        "restart decode-0: succeeded",
        "stop : succeeded",
    ):
        assert line in said
