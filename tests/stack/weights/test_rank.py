"""One rank's loads into a model whose parameters stay as they are loaded, as on a GPU; no engine is around it."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from vllm.model_executor.layers.quantization.auto_awq import AutoAWQLinearMethod
from vllm.model_executor.model_loader.reload import record_metadata_for_reloading

from connectors.vllm_plugin.weights.agreement import AgreementLost, EngineRanks
from connectors.vllm_plugin.weights.host_copy import HostCopy
from connectors.vllm_plugin.weights.rank import RankWeights
from connectors.vllm_plugin.weights.settings import WeightSettings
from connectors.vllm_plugin.weights.verdict import RankReport, WeightCommand
from tests.stack.weights import nixl_trainer
from tests.stack.weights.hanging_disk import hanging_disk
from tests.stack.weights.programs import ENVIRONMENT, Program

pytestmark = [pytest.mark.stack, pytest.mark.timeout(120)]

WIDTH, LAYERS, VOCABULARY, PADDED = 8, 3, 10, 12
Tensors = dict[str, torch.Tensor]


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fused = nn.Parameter(torch.zeros(2 * WIDTH, WIDTH), requires_grad=False)
        self.turned = nn.Parameter(torch.zeros(WIDTH, 2), requires_grad=False)
        self.register_buffer("mean", torch.zeros(WIDTH))


class Model(nn.Module):
    """Loads as vLLM's models do: parts of a fused parameter, a transposed matrix, padding, tied weights."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(PADDED, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))
        self.norm = nn.Parameter(torch.zeros(WIDTH, dtype=torch.float32), requires_grad=False)
        self.head = nn.Linear(WIDTH, PADDED, bias=False)
        self.head.weight = self.embed.weight
        record_metadata_for_reloading(self)

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        parameters = {**dict(self.named_parameters()), **dict(self.named_buffers())}
        for name, tensor in weights:
            if name == "embed":
                parameters["embed.weight"].data[:VOCABULARY].copy_(tensor)
                parameters["embed.weight"].data[VOCABULARY:].fill_(0)
            elif name.endswith((".up", ".gate")):
                start = WIDTH if name.endswith(".up") else 0
                fused = parameters[name.rpartition(".")[0] + ".fused"]
                fused.data.narrow(0, start, WIDTH).copy_(tensor)
            elif name.endswith(".turned"):
                parameters[name].data.copy_(tensor.t())
            else:
                parameters[name].data.copy_(tensor)


def weights(seed: int, dtype: torch.dtype = torch.float32) -> Tensors:
    generator = torch.Generator().manual_seed(seed)
    shapes: dict[str, tuple[int, ...]] = {"embed": (VOCABULARY, WIDTH), "norm": (WIDTH,)}
    for layer in range(LAYERS):
        shapes |= {f"layers.{layer}.{part}": (WIDTH, WIDTH) for part in ("gate", "up")}
        shapes |= {f"layers.{layer}.turned": (2, WIDTH), f"layers.{layer}.mean": (WIDTH,)}
    return {name: torch.randn(shape, generator=generator).to(dtype) for name, shape in shapes.items()}


def assert_holds(model: Model, tensors: Tensors) -> None:
    fresh = Model()
    fresh.load_weights(tensors.items())
    for name, tensor in fresh.state_dict().items():
        assert torch.equal(model.state_dict()[name], tensor), name


class Rank:
    """One rank, and versions in folders."""

    def __init__(self, folder: Path, **settings: Any) -> None:
        self.model = Model()
        self.folder = folder
        self.rank = RankWeights(self.model, torch.float32, EngineRanks(0, 1, []), WeightSettings(**settings))

    def source(self, version: str, tensors: Tensors) -> dict[str, Any]:
        folder = self.folder / version
        folder.mkdir()
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")
        return {"transport": "path", "version": version, "path": str(folder)}

    def obey(self, name: Any, **fields: Any) -> RankReport:
        return RankReport.from_wire(self.rank.answer(WeightCommand(name=name, call="c", **fields).to_wire()))

    def load(self, version: str, tensors: Tensors, **fields: Any) -> RankReport:
        return self.obey("load", source=self.source(version, tensors), **fields)


@pytest.fixture(params=[("gpu_fetch", False), ("cpu_prefetch", False), ("cpu_prefetch", True)])
def rank(tmp_path: Path, request: pytest.FixtureRequest) -> Rank:
    mode, keep_copy = request.param
    return Rank(tmp_path, mode=mode, keep_copy=keep_copy)


def test_loads_in_a_row_and_plans_once(rank: Rank) -> None:
    for seed in (1, 2, 3):
        report = rank.load(f"v{seed}", weights(seed))
        assert (report.ok, report.version, report.error) == (True, f"v{seed}", "")
        assert_holds(rank.model, weights(seed))
        assert rank.model.head.weight is rank.model.embed.weight
        assert report.last_load is not None
        groups = [group["name"] for group in report.last_load.numbers["groups"]]
        layers = [f"layers.{layer}" for layer in range(LAYERS)]
        assert groups == ["before the layers", *layers, "buffers"]


def test_one_sided_reads_straight_from_a_trainer(rank: Rank, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in ENVIRONMENT.items():
        monkeypatch.setenv(name, value)
    rank.load("v0", weights(2))
    rank.source("v1", weights(1))
    trainer = Program(nixl_trainer.run, rank.folder / "v1", environment={})
    try:
        report = rank.obey("load", source=trainer.hear("published"))
        assert report.ok, report.error
    finally:
        rank.rank.close()
        trainer.stop()
    assert_holds(rank.model, weights(1))


def test_what_is_sent_in_another_dtype_is_cast(rank: Rank) -> None:
    assert rank.load("v1", weights(1, torch.bfloat16)).ok
    assert_holds(rank.model, weights(1, torch.bfloat16))
    # With another dtype it is another plan, and other room in host memory.
    report = rank.load("v2", weights(2))
    assert report.ok, report.error
    assert_holds(rank.model, weights(2))


def test_a_source_that_does_not_fit_changes_nothing(rank: Rank) -> None:
    rank.load("v1", weights(1))
    faults: list[Tensors] = [
        {name: tensor for name, tensor in weights(2).items() if name not in ("norm", "layers.1.up")},
        {**weights(2), "layers.0.turned": torch.zeros(3, WIDTH)},
        {**weights(2), "stranger": torch.zeros(3)},
    ]
    for number, fault in enumerate(faults):
        report = rank.load(f"fault-{number}", fault)
        assert (report.ok, report.version, report.torn) == (False, "v1", "")
        assert report.last_load is not None
        assert report.last_load.names
        assert_holds(rank.model, weights(1))
    assert rank.load("v3", weights(3)).ok
    assert_holds(rank.model, weights(3))


def test_values_that_are_no_numbers_are_found_on_request(tmp_path: Path) -> None:
    bad = weights(2)
    bad["layers.2.up"][0, 0] = float("nan")
    direct = Rank(tmp_path / "direct", mode="gpu_fetch")
    copied = Rank(tmp_path / "copied", mode="cpu_prefetch")
    for rank in (direct, copied):
        rank.folder.mkdir()
        rank.load("v1", weights(1))
        report = rank.load("bad", bad, check_finite=True)
        assert (report.ok, report.version) == (False, "v1")
        assert report.last_load is not None
        assert report.last_load.names == ["layers.2.up"]
    assert not copied.obey("state").torn
    assert_holds(copied.model, weights(1))
    assert direct.obey("state").torn
    assert direct.load("v3", weights(3)).ok
    assert not direct.obey("state").torn
    assert_holds(direct.model, weights(3))


def test_a_copy_that_failed_to_fill_is_not_kept_in_memory(tmp_path: Path) -> None:
    def copies() -> int:
        return sum(type(each) is HostCopy for each in gc.get_objects())

    gc.collect()
    before = copies()
    rank = Rank(tmp_path, mode="cpu_prefetch")
    bad = weights(2)
    bad["layers.2.up"][0, 0] = float("nan")
    gc.disable()
    try:
        assert not rank.load("bad", bad, check_finite=True).ok
        assert copies() == before
    finally:
        gc.enable()


def test_a_read_that_comes_back_late_never_writes_over_a_later_version(rank: Rank) -> None:
    rank.load("v1", weights(1))
    v3 = rank.source("v3", weights(3))
    with hanging_disk() as come_back:
        assert "not done after" in rank.load("v2", weights(2), timeout_s=0.3).error
        assert "has not come back" in rank.obey("load", source=v3, timeout_s=0.3).error
        come_back()
        report = rank.obey("load", source=v3)
    assert (report.ok, report.version) == (True, "v3"), report.error
    assert_holds(rank.model, weights(3))


class Pair(EngineRanks):
    """Two ranks that are threads of this process."""

    meeting = threading.Barrier(2)
    said: ClassVar[dict[int, Any]] = {}

    def gather(self, mine: Any, wait_s: float) -> list[Any]:
        try:
            self.meeting.wait(min(wait_s, 5.0))
            self.said[self.rank] = mine
            self.meeting.wait()
            told = [self.said[rank] for rank in range(self.size)]
            self.meeting.wait()
        except threading.BrokenBarrierError:
            raise AgreementLost("alone") from None
        return told


class Half(nn.Module):
    """One of two tensor parallel ranks."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.rank = rank
        self.rows = nn.Parameter(torch.zeros(2, 3), requires_grad=False)
        record_metadata_for_reloading(self)

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        for name, tensor in weights:
            getattr(self, name).data.copy_(tensor.narrow(0, 2 * self.rank, 2))


def test_a_plan_that_is_new_to_one_rank_alone_is_judged_by_all(tmp_path: Path) -> None:
    halves = [Half(rank) for rank in range(2)]
    ranks = [RankWeights(half, torch.float32, Pair(half.rank, 2, []), WeightSettings()) for half in halves]

    def load(*folders: Path) -> list[RankReport]:
        def one(rank: RankWeights, folder: Path) -> RankReport:
            source = {"transport": "path", "version": "v", "path": str(folder)}
            return RankReport.from_wire(rank.answer(WeightCommand(name="load", call="c", source=source).to_wire()))

        with ThreadPoolExecutor(2) as pool:
            return list(pool.map(one, ranks, folders))

    full = {"wide": torch.randn(4, 3), "narrow": torch.randn(4, 3).bfloat16(), "long": torch.randn(6, 3)}
    for name, tensor in full.items():
        (tmp_path / name).mkdir()
        save_file({"rows": tensor}, tmp_path / name / "model.safetensors")
    wide, narrow, long = (tmp_path / name for name in full)
    assert all(report.ok for report in load(wide, wide))
    # Rank 0 alone comes to know a manifest of another dtype, and has to record the one before anew.
    assert not any(report.ok for report in load(narrow, tmp_path / "nowhere"))
    reports = load(wide, wide)
    assert [(report.ok, report.lost) for report in reports] == [(True, "")] * 2, reports
    assert torch.equal(torch.cat([half.rows for half in halves]), full["wide"])
    for paths, told in (((narrow, wide), "different tensors"), ((long, long), "only a part")):
        for report in load(*paths):
            assert told in report.error
            assert (report.torn, report.lost) == ("", "")


@pytest.mark.parametrize("mode", ["gpu_fetch", "cpu_prefetch"])
def test_a_file_that_was_overwritten_between_the_ranks_opens_is_named(tmp_path: Path, mode: str) -> None:
    """The new one has the same tensors, so nothing else tells that one rank would load old weights."""
    file = tmp_path / "model.safetensors"
    halves = [Half(rank) for rank in range(2)]
    ranks = [RankWeights(half, torch.float32, Pair(half.rank, 2, []), WeightSettings()) for half in halves]
    command = WeightCommand(
        name="load", call="c", source={"transport": "path", "version": "v", "path": str(tmp_path)}, mode=mode
    )

    def load(overwrite: bool) -> list[RankReport]:
        save_file({"rows": torch.randn(4, 3)}, file)
        with ThreadPoolExecutor(2) as pool:
            first = pool.submit(ranks[0].answer, command.to_wire())
            while not Pair.meeting.n_waiting:
                assert not first.done()
                threading.Event().wait(0.01)
            if overwrite:
                save_file({"rows": torch.randn(4, 3)}, file)
            second = pool.submit(ranks[1].answer, command.to_wire())
            return [RankReport.from_wire(each.result()) for each in (first, second)]

    for report in load(overwrite=True):
        assert (report.ok, report.torn, report.lost) == (False, "", "")
        assert str(file) in report.error
    assert all(report.ok for report in load(overwrite=False))
    assert torch.equal(torch.cat([half.rows for half in halves]), load_file(file)["rows"])


def test_parameters_in_fewer_bits_than_are_sent_are_refused_for_gpu_fetch_at_the_start(tmp_path: Path) -> None:
    model = Model()
    model.layers[1].quant_method = AutoAWQLinearMethod(None)
    for mode, refused in (("gpu_fetch", True), ("cpu_prefetch", False)):
        with pytest.raises(ValueError, match=r"quantised \(layers\.1, ") if refused else nullcontext():
            RankWeights(model, torch.float32, EngineRanks(0, 1, []), WeightSettings(mode=mode))


def test_orders_and_unknown_commands(rank: Rank) -> None:
    assert rank.load("v1", weights(1), order=(1, 0, 5)).ok
    late = rank.load("v2", weights(2), order=(1, 0, 4))
    assert (late.ok, late.version) == (False, "v1")
    assert "too late" in late.error
    assert not rank.obey("dance").ok
    assert not RankReport.from_wire(rank.rank.answer({"name": "load", "call": "c", "stranger": 1})).ok
    assert not rank.load("v3", weights(3), mode="fast").ok
    assert not rank.obey("load", source={"transport": "pigeon", "version": "v4"}).ok
    for transport, field in (("path", "path"), ("store", "manifest"), ("nixl", "host")):
        assert f"needs {field} " in rank.obey("load", source={"transport": transport, "version": "v4"}).error
    assert_holds(rank.model, weights(1))
