"""The example trainer as a user starts it: by torchrun, on two ranks."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from connectors.weights.path import PathTransport
from connectors.weights.source import Target
from connectors.weights.store import StoreTransport
from connectors.weights.tensors import Piece
from orchestrator.api.access import Access
from orchestrator.api.server import build_app
from tests.fakes.fake_launch import FakeFleet
from tests.fakes.tiny_model import make_tiny_model
from tests.integration.orchestrator.serving import serving
from tests.stack.weights.engine_process import engine
from tests.stack.weights.volume import running_volume

pytestmark = [pytest.mark.stack, pytest.mark.timeout(600)]

REPOSITORY = Path(__file__).parents[3]
TRAINER = REPOSITORY / "deploy" / "examples" / "weights" / "trainer.py"
PORT = 10100
RUN_S = 240
READ_S = 30


@pytest.fixture(scope="module")
def model() -> Path:
    return make_tiny_model(REPOSITORY / ".cache" / "models" / "tiny-qwen3")


def train(folder: Path, model: Path, *arguments: str) -> list[dict[str, Any]]:
    """What it says of each version."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(TRAINER)]
    command += ["--model", str(model), "--versions", "2", "--every", "0.5"]
    environment = {**os.environ, "UCX_TLS": "tcp,self,sm", "UCX_NET_DEVICES": "lo", "OMP_NUM_THREADS": "1"}
    with (folder / "errors").open("wb") as errors:
        done = subprocess.run(
            [*command, *arguments],
            cwd=REPOSITORY,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=errors,
            timeout=RUN_S,
        )
    assert done.returncode == 0, (folder / "errors").read_text(errors="replace")[-4000:]
    lines = [line for line in done.stdout.decode().splitlines() if line.startswith("{")]
    return [json.loads(line) for line in lines]


def read_whole(transport: Any, source: Any, name: str) -> torch.Tensor:
    pieces: list[Piece] = []

    def plan(manifest: Any) -> Sequence[Sequence[Piece]]:
        pieces.append(Piece(name, manifest[name].whole))
        return [pieces]

    fetch = transport.open(source, plan, timeout_s=READ_S)
    into = torch.zeros(pieces[0].shape)
    fetch.fetch(0, [Target(pieces[0], into)])
    fetch.close()
    return into


NAME = "model.layers.2.mlp.down_proj.weight"


@pytest.mark.full
def test_every_version_is_a_checkpoint_of_new_weights(tmp_path: Path, model: Path) -> None:
    said = train(tmp_path, model, "--transport", "path", "--folder", str(tmp_path / "versions"))
    assert [each["source"]["version"] for each in said] == ["step-1", "step-2"]
    before = load_file(model / "model.safetensors")
    first, second = (read_whole(PathTransport(), each["source"], NAME) for each in said)
    assert first.shape == second.shape == before[NAME].shape
    assert not torch.equal(first, before[NAME])
    assert not torch.equal(first, second)
    published = Path(said[1]["source"]["path"])
    assert load_file(published / "model.safetensors").keys() == before.keys()
    assert (published / "config.json").read_text() == (model / "config.json").read_text()


@pytest.mark.full
def test_the_same_by_way_of_a_volume(tmp_path: Path, model: Path) -> None:
    with running_volume(tmp_path, capacity_bytes=256 << 20, lease_s=5) as running:
        said = train(tmp_path, model, "--transport", "store", "--volume", running.volume.master)
        first, second = (read_whole(StoreTransport(), each["source"], NAME) for each in said)
    assert not torch.equal(first, second)


@pytest.mark.full
def test_it_updates_a_running_engine_from_its_shards(tmp_path: Path, model: Path) -> None:
    with engine(model, tmp_path / "engine", PORT, cores="0") as running:
        arguments = ["--engine", running.url, "--token-file", str(running.folder / "token")]
        said = train(tmp_path, model, "--transport", "nixl", *arguments)
        assert [each["version"] for each in said if "engine" in each] == ["step-1", "step-2"], said
        assert running.client.weights().version == "step-2"
        assert running.client.fence().epoch == 2


@pytest.fixture
def job_url(tmp_path: Path) -> Iterator[str]:
    """Of a job on model engines; its token is in `token`."""
    (tmp_path / "token").write_text("the-token\n")
    fleet = FakeFleet(tmp_path)
    fleet.record(fleet.plan(weights={}))
    fleet.supervision().open(fleet.bring_up())
    with serving(build_app(fleet.service(), Access({"the-token": "admin"}))) as api:
        yield f"{api.base_url}/jobs/demo"


def test_it_updates_a_job_and_says_how_that_ended(
    tmp_path: Path, job_url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    spec = importlib.util.spec_from_file_location("example_trainer", TRAINER)
    assert spec is not None
    assert spec.loader is not None
    trainer = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(trainer)
    source = {"transport": "path", "path": "/versions/step-1", "version": "step-1"}
    for _ in range(2):
        trainer.update_job(job_url, str(tmp_path / "token"), source)
    updated, refused = map(json.loads, capsys.readouterr().out.splitlines())
    assert (updated["version"], updated["outcome"], updated["why"]) == ("step-1", "committed", "")
    assert refused["error"].startswith("409: ")
