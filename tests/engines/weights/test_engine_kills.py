"""Trainers, storage clients and engines that die or stand still while a real engine loads.

One engine of many layers per number of ranks: a load takes long enough to be hit in the middle. What had been written
by then differs from run to run, so an engine is either untouched or torn, and must be right in both cases. The tests go
on with it in their order; the last one kills it.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from connectors.engine_client import WeightsAnswer
from connectors.publisher.store import StorePublisher
from tests.fakes.tiny_model import make_tiny_model
from tests.stack.weights import nixl_trainer
from tests.stack.weights.checkpoints import path_source, tensors_of
from tests.stack.weights.engine_process import MODELS, EngineProcess, engine
from tests.stack.weights.nixl_trainer import LEASE_S, is_read_by
from tests.stack.weights.programs import Program
from tests.stack.weights.volume import running_volume

pytestmark = [pytest.mark.stack, pytest.mark.full, pytest.mark.timeout(600)]

PORT = 8300
LAYERS = 120
VOLUME_BYTES = 512 << 20
TIMEOUT_S = 5.0
LIMIT_S = 20.0
MARGIN_S = 20.0
"""On top of LIMIT_S + TIMEOUT_S: what ranks wait for each other, and a slow machine."""
BEGIN_S = 60.0
INTO_IT = 0.3
"""Part of a load that has passed when something happens to it."""
ONLY_TCP = {"UCX_TLS": "tcp,self"}
"""Reads that need the producer's processor, so that they stop with it."""


@dataclass
class Running:
    engine: EngineProcess
    models: list[Path]
    expected: list[list[float]]
    """What it computes with each of them."""
    load_s: float
    """Of one load, as fast as this machine is."""

    def path(self, version: int) -> dict[str, Any]:
        return path_source(self.models[version], f"v{version}")

    def load_hit(
        self,
        source: Mapping[str, Any],
        is_read: Callable[[], bool],
        hit: Callable[[], None],
        mend: Callable[[], None] = lambda: None,
    ) -> None:
        """A load with a `hit` in the middle of it: the engine says so in time on all ranks, is alive, and either as it
        was or fenced; the next good load brings it back, once what hangs is mended."""
        version = self.engine.client.weights().version
        with ThreadPoolExecutor(1) as pool:
            began = time.monotonic()
            loading = pool.submit(self.engine.load, source, mode="gpu_fetch", timeout_s=TIMEOUT_S, limit_s=LIMIT_S)
            wait_until(is_read)
            time.sleep(INTO_IT * self.load_s)
            hit()
            answer = loading.result()
        assert time.monotonic() - began < LIMIT_S + TIMEOUT_S + MARGIN_S
        assert (answer.ok, answer.version) == (False, version)
        self.assert_contained(answer)
        mend()
        for number in (1, 0):
            self.engine.update(self.path(number))
            assert self.engine.logprobs() == self.expected[number]

    def assert_contained(self, answer: WeightsAnswer) -> None:
        assert all(report.last_load is not None and report.last_load.error for report in answer.ranks)
        assert len({bool(report.torn) for report in answer.ranks}) == 1
        if answer.unfit:
            assert self.engine.complete().status_code == 503
            assert self.engine.call("GET", "/health").status_code == 503
        else:
            assert self.engine.logprobs() == self.expected[0]


@pytest.fixture(scope="module", params=[1, 2], ids=["tp1", "tp2"])
def running(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Iterator[Running]:
    folder = tmp_path_factory.mktemp("kills")
    models = [make_tiny_model(MODELS / f"weights-deep-{seed}", seed, layers=LAYERS) for seed in range(2)]
    with engine(models[0], folder, PORT, ranks=request.param) as started:
        expected = []
        for number in (1, 0):
            answer = started.update(path_source(models[number], f"v{number}"))
            expected.insert(0, started.logprobs())
        (last, *_) = (report.last_load for report in answer.ranks)
        assert last is not None
        yield Running(started, models, expected, sum(group["seconds"] for group in last.numbers["groups"]))


@pytest.fixture
def trainer(running: Running, request: pytest.FixtureRequest) -> Iterator[Program]:
    program = Program(nixl_trainer.run, running.models[1], environment=getattr(request, "param", {}))
    yield program
    program.stop()


def wait_until(happens: Callable[[], bool]) -> None:
    deadline = time.monotonic() + BEGIN_S
    while not happens():
        assert time.monotonic() < deadline
        time.sleep(0.005)


@pytest.mark.parametrize("mode", ["gpu_fetch", "cpu_prefetch"])
def test_a_trainer_that_is_gone_before_costs_a_bounded_time_and_nothing_else(
    running: Running, trainer: Program, mode: str
) -> None:
    source = trainer.hear("published")
    trainer.kill()
    answer = running.engine.load(source, mode=mode, timeout_s=TIMEOUT_S, limit_s=LIMIT_S)
    assert (answer.ok, answer.version, answer.unfit) == (False, "v0", "")
    assert running.engine.logprobs() == running.expected[0]


def test_a_trainer_killed_during_a_read(running: Running, trainer: Program) -> None:
    source = trainer.hear("published")
    running.load_hit(source, lambda: is_read_by(trainer, running.engine.ranks), trainer.kill)


@pytest.mark.parametrize("trainer", [ONLY_TCP], indirect=True)
def test_a_trainer_that_stands_still_during_a_read(running: Running, trainer: Program) -> None:
    source = trainer.hear("published")
    running.load_hit(source, lambda: is_read_by(trainer, running.engine.ranks), lambda: trainer.signal(signal.SIGSTOP))


@pytest.mark.parametrize("number", [signal.SIGSTOP, signal.SIGKILL])
def test_a_storage_client_that_dies_or_stands_still_during_a_read(
    running: Running, tmp_path: Path, number: signal.Signals
) -> None:
    with running_volume(tmp_path, capacity_bytes=VOLUME_BYTES, lease_s=LEASE_S) as volume:
        publisher = StorePublisher(volume.volume, job="kills", keep=1)
        source = publisher.publish(tensors_of(running.models[1]), "v1").source
        # A first load connects, so that the second one is hit while it reads.
        running.engine.update(source)
        running.engine.update(running.path(0))
        # A read that hangs in a client that stands still may write whenever that goes on: nothing is loaded before.
        running.load_hit(
            source,
            lambda: True,
            lambda: volume.client.popen.send_signal(number),
            lambda: volume.client.popen.send_signal(signal.SIGCONT),
        )
        publisher.close()


def test_an_engine_killed_during_a_read_holds_the_trainer_up_for_its_lease_alone(
    running: Running, trainer: Program
) -> None:
    """The last test: it kills the engine."""
    ranks = running.engine.ranks
    source = trainer.hear("published")
    with ThreadPoolExecutor(1) as pool:
        loading = pool.submit(running.engine.load, source, mode="gpu_fetch")
        wait_until(lambda: is_read_by(trainer, ranks))
        running.engine.kill()
        assert loading.exception() is not None
    trainer.tell("wait", ranks, 10 * LEASE_S)
    began = time.monotonic()
    assert trainer.hear("done") == ranks
    assert time.monotonic() - began < 2 * LEASE_S
