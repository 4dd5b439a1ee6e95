"""Every kind of model by every transport in both modes, with one rank and with two, three versions in a row."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch

from connectors.publisher.nixl import NixlPublisher
from connectors.publisher.store import StorePublisher
from tests.engines.weights.reference import reference
from tests.fakes.tiny_model import Architecture
from tests.stack.weights.checkpoints import Tensors, changed, checkpoints, path_source, tensors_of
from tests.stack.weights.engine_process import EngineProcess, engine
from tests.stack.weights.volume import running_volume

pytestmark = [pytest.mark.stack, pytest.mark.full, pytest.mark.timeout(900)]

PORT = 8200
TOLERANCE = 1e-5
VOLUME_BYTES = 256 << 20
VERSIONS = 3
TIMEOUT_S = 60.0

Publish = Callable[[Tensors, str], Mapping[str, Any]]


@pytest.fixture(scope="module")
def publishers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Publish]]:
    """Publishers that hold what they have published until the module ends."""
    with ExitStack() as stack:
        folder = tmp_path_factory.mktemp("volume")
        volume = stack.enter_context(running_volume(folder, capacity_bytes=VOLUME_BYTES, lease_s=10.0))
        store = StorePublisher(volume.volume, job="matrix", keep=2)
        stack.callback(store.close)
        nixl = NixlPublisher(host="127.0.0.1")
        stack.callback(nixl.close)
        yield {
            "store": lambda tensors, version: store.publish(tensors, version).source,
            "nixl": lambda tensors, version: nixl.publish(tensors, version).source,
        }


def assert_computes(started: EngineProcess, expected: list[float]) -> None:
    pairs = zip(started.logprobs(), expected, strict=True)
    assert max(abs(here - there) for here, there in pairs) < TOLERANCE


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("architecture", ["qwen3", "qwen3_tied", "llama_biased", "qwen3_moe"])
def test_loads(publishers: dict[str, Publish], tmp_path: Path, architecture: Architecture, ranks: int) -> None:
    models = checkpoints(architecture, VERSIONS)
    with (
        reference(models[1:], tmp_path, ranks=ranks) as on_the_others,
        engine(models[0], tmp_path / "engine", PORT, ranks=ranks) as started,
    ):
        expected = [started.logprobs(), *on_the_others.logprobs()]
        for transport in ("path", "store", "nixl"):
            for mode in ("gpu_fetch", "cpu_prefetch"):
                for number in (1, 2, 0):
                    version = f"{architecture}-{ranks}-{transport}-{mode}-{number}"
                    if transport == "path":
                        source: Mapping[str, Any] = path_source(models[number], version)
                    else:
                        source = publishers[transport](tensors_of(models[number]), version)
                    answer = started.update(source, mode=mode, check_finite=True, timeout_s=TIMEOUT_S)
                    assert (answer.version, started.weight_version()) == (version, version)
                    assert_computes(started, expected[number])


def fuse_experts(tensors: Tensors) -> None:
    """As transformers' modules, and so trainers, have the experts that checkpoints have one by one."""
    down = [name for name in tensors if name.endswith("experts.0.down_proj.weight")]
    for prefix in (name.removesuffix("0.down_proj.weight") for name in down):
        count = sum(name.startswith(prefix) and name.endswith("down_proj.weight") for name in tensors)
        parts = {
            part: torch.stack([tensors.pop(f"{prefix}{expert}.{part}.weight") for expert in range(count)])
            for part in ("gate_proj", "up_proj", "down_proj")
        }
        tensors[f"{prefix}gate_up_proj"] = torch.cat([parts["gate_proj"], parts["up_proj"]], dim=1)
        tensors[f"{prefix}down_proj"] = parts["down_proj"]


@pytest.mark.parametrize("ranks", [1, 2])
def test_experts_as_a_trainer_has_them(tmp_path: Path, ranks: int) -> None:
    models = checkpoints("qwen3_moe", 2)
    with engine(models[0], tmp_path / "engine", PORT, ranks=ranks) as started:
        started.update(path_source(models[1], "one by one"), timeout_s=TIMEOUT_S)
        expected = started.logprobs()
        for mode in ("gpu_fetch", "cpu_prefetch"):
            started.update(path_source(models[0], f"before {mode}"), timeout_s=TIMEOUT_S)
            fused = changed(models[1], tmp_path / f"fused-{mode}", fuse_experts)
            started.update(fused, mode=mode, check_finite=True, timeout_s=TIMEOUT_S)
            assert_computes(started, expected)


def test_a_new_engine_loads_from_one_that_serves(tmp_path: Path) -> None:
    """The trainer has moved on, and one engine's machine died."""
    models = checkpoints("qwen3", 2)
    settings = {"mode": "cpu_prefetch", "keep_copy": True}
    with ExitStack() as stack:
        on_the_other = stack.enter_context(reference(models[1:], tmp_path))
        healthy = stack.enter_context(engine(models[0], tmp_path / "healthy", PORT, settings=settings, cores="0"))
        healthy.update(path_source(models[1], "v1"))
        killed = stack.enter_context(engine(models[0], tmp_path / "killed", PORT + 1, cores="1"))
        killed.kill()
        served = healthy.client.serve_weights(healthy.instance, healthy.next_order())
        assert served.ok, served.error
        source = served.ranks[0].served
        assert source is not None
        joined = stack.enter_context(engine(models[0], tmp_path / "joined", PORT + 2, ranks=1, cores="1"))
        joined.update(source, mode="gpu_fetch", timeout_s=TIMEOUT_S)
        assert joined.weight_version() == "v1"
        (expected,) = on_the_other.logprobs()
        assert_computes(joined, expected)
        # Its own next load ends the serving; the engine that was served stays whole.
        healthy.update(path_source(models[0], "v2"))
        assert_computes(joined, expected)
