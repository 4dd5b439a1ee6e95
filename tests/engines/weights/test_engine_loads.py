"""Weights of a running engine with two ranks, replaced in place: what it computes after loads and failed loads.

One engine for all tests of this module, which go on with it in their order.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pytest
import requests
from vllm.distributed.weight_transfer.clients import HTTPVLLMWeightSyncClient

from connectors.engine_client import EngineCallFailed, LoadOptions
from connectors.vllm_plugin.fence_rules import WEIGHTS_PATH
from connectors.vllm_plugin.weights.verdict import RankReport
from tests.engines.weights.reference import reference
from tests.stack.weights import nixl_trainer
from tests.stack.weights.checkpoints import Tensors, changed, checkpoints, path_source
from tests.stack.weights.engine_process import EngineProcess, engine
from tests.stack.weights.programs import Program

pytestmark = [pytest.mark.stack, pytest.mark.timeout(600)]

PORT = 8100
RANKS = 2
TOLERANCE = 1e-5
SETTLE_S = 60
PREFETCH_SHARE = 0.05
"""A prefetch takes seconds, so that something can happen to it."""
LAST_LAYER_DOWN = "model.layers.3.mlp.down_proj.weight"


@dataclass
class Running:
    """The engine, the versions that there are, and what an engine that was started on each of them says."""

    engine: EngineProcess
    models: list[Path]
    expected: list[list[float]]

    def source(self, version: int) -> dict[str, Any]:
        return path_source(self.models[version], f"v{version}")

    def assert_computes(self, version: int) -> None:
        pairs = zip(self.engine.logprobs(), self.expected[version], strict=True)
        assert max(abs(here - there) for here, there in pairs) < TOLERANCE

    def assert_has(self, version: int) -> None:
        """By name and by what it computes."""
        assert (self.engine.client.weights().version, self.engine.weight_version()) == (f"v{version}", f"v{version}")
        self.assert_computes(version)


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    folder = tmp_path_factory.mktemp("loads")
    models = checkpoints("qwen3", 2)
    settings = {"keep_copy": True, "prefetch_share": PREFETCH_SHARE}
    with (
        reference(models[1:], folder, ranks=RANKS) as on_the_other,
        engine(models[0], folder / "engine", PORT, ranks=RANKS, settings=settings) as started,
    ):
        assert started.client.weights().version is None
        yield Running(started, models, [started.logprobs(), *on_the_other.logprobs()])


@pytest.mark.parametrize("mode", ["gpu_fetch", "cpu_prefetch"])
def test_three_loads_in_a_row(running: Running, mode: str) -> None:
    for version in (1, 0, 1):
        answer = running.engine.update(running.source(version), mode=mode, check_finite=True)
        running.assert_has(version)
        for report in answer.ranks:
            assert report.last_load is not None
            numbers = report.last_load.numbers
            assert numbers["bytes"] == sum(group["bytes"] for group in numbers["groups"]) > 0
            assert [group["name"] for group in numbers["groups"]][1:5] == [
                f"model.layers.{layer}" for layer in range(4)
            ]
            assert all(each["seconds"] > 0 and each["gb_per_s"] > 0 for each in (numbers, *numbers["groups"]))
            assert numbers["transfer_s"] > 0
            assert {"wait_s", "copy_s", "process_s", "peak_extra_bytes"} <= numbers.keys()


def to_bfloat16(tensors: Tensors) -> None:
    for name, tensor in tensors.items():
        tensors[name] = tensor.bfloat16()


def and_back(tensors: Tensors) -> None:
    for name, tensor in tensors.items():
        tensors[name] = tensor.bfloat16().float()


@pytest.mark.parametrize("mode", ["gpu_fetch", "cpu_prefetch"])
def test_what_is_sent_in_another_dtype_is_cast(running: Running, tmp_path: Path, mode: str) -> None:
    engine = running.engine
    engine.update(changed(running.models[0], tmp_path / "cast", to_bfloat16), mode=mode)
    cast = engine.logprobs()
    engine.update(changed(running.models[0], tmp_path / "as-it-is", and_back), mode=mode)
    assert engine.logprobs() == cast
    assert cast != running.expected[0]
    engine.update(running.source(1), mode=mode)


def wait_for_ranks(running: Running, settled: Callable[[RankReport], bool]) -> None:
    deadline = time.monotonic() + SETTLE_S
    while not all(map(settled, running.engine.client.weights().ranks)):
        assert time.monotonic() < deadline, running.engine.client.weights()


def test_a_prefetch_while_generating(running: Running) -> None:
    engine = running.engine
    assert engine.client.prefetch_weights(engine.instance, running.source(0), engine.next_order()).ok
    running.assert_has(1)
    wait_for_ranks(running, lambda report: report.prefetched == "v0")
    engine.update(running.source(0), mode="cpu_prefetch")
    running.assert_has(0)


def test_a_prefetch_that_is_reset_leaves_nothing(running: Running) -> None:
    engine = running.engine
    assert engine.client.prefetch_weights(engine.instance, running.source(1), engine.next_order()).ok
    command = {"instance": engine.instance, **asdict(engine.next_order())}
    assert engine.call("POST", f"{WEIGHTS_PATH}reset", command).is_success
    ranks = engine.client.weights().ranks
    assert [(report.phase, report.prefetched) for report in ranks] == [("idle", None)] * RANKS
    running.assert_has(0)


def test_a_trainer_killed_during_a_prefetch_changes_nothing(running: Running) -> None:
    engine = running.engine
    trainer = Program(nixl_trainer.run, running.models[1], environment={})
    try:
        source = trainer.hear("published")
        assert engine.client.prefetch_weights(engine.instance, source, engine.next_order()).ok
        assert nixl_trainer.is_read_by(trainer, RANKS)
        trainer.kill()
        wait_for_ranks(running, lambda report: report.phase == "idle")
    finally:
        trainer.stop()
    assert all("prefetch of v1" in report.error for report in engine.client.weights().ranks)
    running.assert_has(0)
    engine.update(running.source(1), mode="cpu_prefetch")
    engine.update(running.source(0), mode="cpu_prefetch")


def without_a_norm(tensors: Tensors) -> None:
    del tensors["model.layers.2.input_layernorm.weight"], tensors["lm_head.weight"]


def with_a_taller_matrix(tensors: Tensors) -> None:
    tensors[LAST_LAYER_DOWN] = tensors[LAST_LAYER_DOWN].repeat(2, 1)


def with_a_longer_projection(tensors: Tensors) -> None:
    """Of which each rank takes the rows that it always takes."""
    tensors["model.layers.1.self_attn.q_proj.weight"] = tensors["model.layers.1.self_attn.q_proj.weight"].repeat(2, 1)


def with_a_stranger(tensors: Tensors) -> None:
    tensors["model.layers.0.stranger.weight"] = tensors["model.norm.weight"].clone()


@pytest.mark.parametrize("mode", ["gpu_fetch", "cpu_prefetch"])
@pytest.mark.parametrize(
    ("change", "names"),
    [
        (without_a_norm, {"model.layers.2.input_layernorm.weight", "lm_head.weight"}),
        (with_a_taller_matrix, {LAST_LAYER_DOWN}),
        (with_a_longer_projection, {"model.layers.1.self_attn.q_proj.weight"}),
        (with_a_stranger, {"model.layers.0.stranger.weight"}),
    ],
)
def test_a_source_that_does_not_fit_changes_nothing(
    running: Running, tmp_path: Path, change: Any, names: set[str], mode: str
) -> None:
    before = running.engine.logprobs()
    answer = running.engine.load(changed(running.models[1], tmp_path / "misfit", change), mode=mode)
    assert (answer.ok, answer.version, answer.unfit) == (False, "v0", "")
    for report in answer.ranks:
        assert report.last_load is not None
        assert names <= set(report.last_load.names)
        assert all(name in report.last_load.error for name in names)
    assert running.engine.logprobs() == before
    assert running.engine.call("GET", "/health").status_code == 200


def of_one_rank(tensors: Tensors) -> None:
    """In the half of the last layer that rank 1 takes."""
    tensors[LAST_LAYER_DOWN][:, -1] = float("inf")


def test_a_failed_prefetch_changes_nothing(running: Running, tmp_path: Path) -> None:
    before = running.engine.logprobs()
    source = changed(running.models[1], tmp_path / "infinite", of_one_rank)
    answer = running.engine.load(source, mode="cpu_prefetch", check_finite=True)
    assert (answer.ok, answer.unfit) == (False, "")
    assert running.engine.logprobs() == before


def test_one_rank_that_fails_half_way_fences_the_engine_until_a_load_succeeds(running: Running, tmp_path: Path) -> None:
    engine = running.engine
    source = changed(running.models[1], tmp_path / "infinite", of_one_rank)
    answer = engine.load(source, mode="gpu_fetch", check_finite=True)
    assert (answer.ok, answer.version, engine.weight_version()) == (False, "v0", "v0")
    for report in answer.ranks:
        assert report.torn
        assert report.last_load is not None
        assert report.last_load.names == [LAST_LAYER_DOWN]
    assert engine.complete().status_code == 503
    health = engine.call("GET", "/health")
    assert health.status_code == 503
    assert LAST_LAYER_DOWN in health.text
    with pytest.raises(EngineCallFailed, match="409"):
        engine.serve_next_epoch()
    engine.update(running.source(1), mode="gpu_fetch")
    running.assert_has(1)
    assert engine.call("GET", "/health").status_code == 200


def test_older_commands_are_refused(running: Running) -> None:
    engine = running.engine
    late = engine.next_order()
    engine.update(running.source(0))
    with pytest.raises(EngineCallFailed, match="comes too late"):
        engine.client.load_weights(engine.instance, running.source(1), late, LoadOptions())
    running.assert_has(0)


def sync_client(engine: EngineProcess) -> HTTPVLLMWeightSyncClient:
    return HTTPVLLMWeightSyncClient(engine.url.replace("://", f"://headrace:{engine.token}@"))


def test_vllms_own_client_drives_it(running: Running, tmp_path: Path) -> None:
    client = sync_client(running.engine)
    client.init_weight_transfer_engine({})
    client.start_weight_update()
    client.update_weights({"source": running.source(1)})
    client.finish_weight_update("v1")
    running.engine.serve_next_epoch()
    running.assert_has(1)

    client.start_weight_update()
    with pytest.raises(requests.HTTPError, match="500"):
        client.update_weights({"source": changed(running.models[0], tmp_path / "misfit", without_a_norm)})
    with pytest.raises(requests.HTTPError, match="500"):
        client.finish_weight_update("v9")
    assert running.engine.weight_version() == "v1"


def test_a_driver_that_dies_between_its_calls_is_no_hindrance(running: Running) -> None:
    client = sync_client(running.engine)
    client.start_weight_update()
    client = sync_client(running.engine)
    client.start_weight_update()
    client.update_weights({"source": running.source(0)})
    client = sync_client(running.engine)
    client.start_weight_update()
    client.update_weights({"source": running.source(0)})
    client.finish_weight_update("v0")
    running.engine.serve_next_epoch()
    running.assert_has(0)


def test_a40_after_one_rank_raised_nothing_is_believed(running: Running, tmp_path: Path) -> None:
    """The last test: this life of the engine is over. One rank finds a folder where it would write a file."""
    engine = running.engine
    (tmp_path / "model-rank-0-part-0.safetensors").mkdir()
    raised = engine.call("POST", "/collective_rpc", {"method": "save_sharded_state", "args": [str(tmp_path)]})
    assert raised.status_code == 500
    assert engine.call("GET", "/health").status_code == 503
    assert engine.complete().status_code == 503
    with pytest.raises(EngineCallFailed, match="503"):
        engine.client.load_weights(engine.instance, running.source(1), engine.next_order())
    with pytest.raises(EngineCallFailed, match="409"):
        engine.serve_next_epoch()
    assert engine.weight_version() == "v0"
