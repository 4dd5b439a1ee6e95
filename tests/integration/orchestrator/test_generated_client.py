"""The life of a job over HTTP on a real control plane, its processes real and its engines models: by a client that is
generated from the OpenAPI document, and by curl."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.integration.orchestrator.control_plane import RunningControlPlane, running_control_plane
from tests.integration.orchestrator.generated_client import GeneratedLife, generated, live_with_curl
from tests.unit.orchestrator.samples import pd_data

JOB = pd_data(weights={"transport": "path", "load_mode": "gpu_fetch", "limits": {"grace": 0.1, "again": 0.1}})
WITHIN_S = 120
pytestmark = pytest.mark.timeout(400)


@pytest.fixture
def control_plane(tmp_path: Path) -> Iterator[RunningControlPlane]:
    with running_control_plane(tmp_path, {"HEADRACE_API_TOKEN": "a-known-token"}) as running:
        yield running


def test_a_life_by_a_generated_client(control_plane: RunningControlPlane, tmp_path: Path) -> None:
    with control_plane.client() as client:
        document = client.get("/openapi.json").json()
    life = GeneratedLife(url=control_plane.url, token=control_plane.token, within_s=WITHIN_S)
    with generated(document, tmp_path):
        assert life.live(JOB, "/checkpoints/1") == ["succeeded"] * 6


def test_a_life_with_curl(control_plane: RunningControlPlane, tmp_path: Path) -> None:
    job_file = tmp_path / "job.json"
    job_file.write_text(json.dumps(JOB))
    said = live_with_curl(job_file, control_plane.url, control_plane.token, WITHIN_S, CHECKPOINT="/checkpoints/1")
    for line in (
        "start : succeeded, the job has come up",
        "restart decode-0: succeeded",
        "in epoch 2",
        "stop : succeeded",
    ):
        assert line in said
