"""The parts of the benchmark of weight loads: each starts what it needs, runs its rounds and returns figures.

`bench_weights.py` runs them one after the other. The first round of each is not counted: in it plans are made,
connections set up and memory registered. Within a round the plain transfer and our load follow each other at once.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from tests.benchmarks.figures import Figure
from tests.benchmarks.processes import free_ports
from tests.benchmarks.weights.goals import goal_of
from tests.benchmarks.weights.shapes import ITEM_BYTES, SHAPES
from tests.benchmarks.weights.talker import Talker, ask_all, talking
from tests.benchmarks.weights.trainer import IN_HOST
from tests.stack.weights.volume import running_volume

TRANSPORTS = ("nixl", IN_HOST, "store", "path")
LEASE_S = 5.0
VOLUME_FACTOR = 3.3
"""The volume holds the version that is served, the next one, and one whose leases have not ended."""
GENERATE_S = 8.0
NIXL_RANKS = 2
ENGINE = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
}
CPU_ENGINE = {"TORCHDYNAMO_DISABLE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
CPU_UCX = {"UCX_TLS": "tcp,self,sm", "UCX_NET_DEVICES": "lo"}
GPU_UCX = {
    "UCX_TLS": "cuda_ipc,cuda_copy,tcp,self,sm",
    "UCX_NET_DEVICES": "lo",
    # Where it sees no NVLink, UCX reads a peer's memory over TCP otherwise, and says nothing.
    "UCX_CUDA_IPC_ENABLE_GET_ZCOPY": "on",
}


@dataclass(frozen=True, kw_only=True)
class Scale:
    """How much is measured, and where."""

    rounds: int
    shape: str
    device: str
    """Of the engine and of the trainer's weights: "cpu" or "cuda"."""
    folder: Path
    """For versions, logs and the model: on a tmpfs, if disks are not to be measured."""
    transports: tuple[str, ...]

    @property
    def weight_bytes(self) -> int:
        return sum(math.prod(size) for size in SHAPES[self.shape].tensors().values()) * ITEM_BYTES

    @property
    def ucx(self) -> Mapping[str, str]:
        return CPU_UCX if self.device == "cpu" else GPU_UCX


@dataclass
class Loads:
    """One transport's rounds."""

    plain_s: list[float] = field(default_factory=list)
    load_s: list[float] = field(default_factory=list)
    """On a CPU without the repacking of layers."""
    process_s: list[float] = field(default_factory=list)
    plan_s: list[float] = field(default_factory=list)
    extra: list[float] = field(default_factory=list)
    memcpy_s: list[float] = field(default_factory=list)

    @property
    def ratio(self) -> float:
        return median(self.load_s) / median(self.plain_s)

    def note(self, name: str, nbytes: int) -> str:
        rate = nbytes / median(self.load_s) / 1e9
        return (
            f"{name}: {self.ratio:.2f} of the plain transfer; load {median(self.load_s):.3f} s ({rate:.2f} GB/s), "
            f"plain {median(self.plain_s):.3f} s, memcpy {median(self.memcpy_s):.3f} s, repacking "
            f"{median(self.process_s):.3f} s, peak extra memory {100 * max(self.extra):.1f} % of the weights"
        )


def measure_transports(scale: Scale) -> list[Figure]:
    """Our transports alone, without an engine. Printed; no goal of the result is about them."""
    with ExitStack() as stack:
        trainer = stack.enter_context(trainer_of(scale))
        reader = stack.enter_context(_reader(scale, "reader", 0, 1))
        master = stack.enter_context(volume(scale))
        for transport in scale.transports:
            with _plain_transfer(trainer, reader, transport) as plain:
                for number in range(scale.rounds + 1):
                    source = trainer.ask("publish", transport=transport, version=f"{number}", master=master)
                    plain_s, ours = plain(source), reader.ask("ours", source=source)
                    trainer.ask("done", readers=1)
                    counted = f"round {number}" if number else "first round"
                    say(
                        f"  {transport} {counted}: plain {plain_s:.3f} s, ours {ours['seconds']:.3f} s, of it opening "
                        f"{ours['open_s'] * 1e3:.1f} ms"
                    )
    return []


def measure_gpu_fetch(scale: Scale) -> list[Figure]:
    """Straight into the parameters: time, memory, planning."""
    loads: dict[str, Loads] = {}
    with ExitStack() as stack:
        trainer = stack.enter_context(trainer_of(scale))
        reader = stack.enter_context(_reader(scale, "reader", 0, 1))
        master = stack.enter_context(volume(scale))
        sources: list[dict[str, Any]] = [{"transport": "nixl"}]
        if master:
            sources.append({"transport": "store", "master": master, "protocol": "tcp"})
        checkpoint = trainer.ask("publish", transport="path", version="start-gpu_fetch")
        engine = stack.enter_context(engine_on(scale, checkpoint, {"mode": "gpu_fetch", "sources": sources}))
        for transport in scale.transports:
            with _plain_transfer(trainer, reader, transport) as plain:
                loads[transport] = _load_rounds(scale, transport, trainer, reader, engine, master, plain)
        source = trainer.ask("publish", transport="path", version="stock")
        say(f"  vLLM's own reload_weights of the same files: {engine.ask('stock_reload', path=source['path']):.3f} s")
    return _fetch_figures(scale, loads)


def _load_rounds(
    scale: Scale, transport: str, trainer: Talker, reader: Talker, engine: Talker, master: str, plain: Any
) -> Loads:
    found = Loads()
    for number in range(scale.rounds + 1):
        source = trainer.ask("publish", transport=transport, version=f"{transport}-{number}", master=master)
        plain_s, memcpy_s = plain(source), reader.ask("memcpy")
        report = engine.ask("command", name="load", source=source)
        trainer.ask("done", readers=1)
        numbers = report["last_load"]["numbers"]
        process_s = _total(numbers, "process_s") if scale.device == "cpu" else 0.0
        say(f"  gpu_fetch {transport} round {number}: {_parts(numbers)}; plain {plain_s:.3f} s")
        # The first load counts here: what it took and the allocator kept is not extra in later ones.
        found.extra.append((numbers["peak_extra_bytes"] or 0) / scale.weight_bytes)
        if not number:
            continue
        found.plain_s.append(plain_s)
        found.memcpy_s.append(memcpy_s)
        found.load_s.append(numbers["seconds"] - process_s)
        found.process_s.append(process_s)
        found.plan_s.append(numbers["plan_s"])
    return found


def _fetch_figures(scale: Scale, loads: Mapping[str, Loads]) -> list[Figure]:
    measured = [each for each in loads if each != "path"]
    if not measured:
        return []
    slowest = max(measured, key=lambda transport: loads[transport].ratio)
    notes = [each.note(transport, scale.weight_bytes) for transport, each in loads.items()]
    time = loads[slowest]
    every = list(loads.values())
    return [
        Figure(
            goal=goal_of("gpu_fetch_time_ratio"),
            ours=time.load_s,
            peer=time.plain_s,
            notes=[f"the figure is that of {slowest}, the slower beside its plain transfer", *notes],
        ),
        Figure(
            goal=goal_of("gpu_fetch_extra_memory_ratio"),
            ours=[max(max(each.extra) for each in every)],
            peer=[],
            notes=["the worst of all loads, first ones included"],
        ),
        Figure(
            goal=goal_of("replay_plan_ratio"),
            ours=[plan_s for each in every for plan_s in each.plan_s],
            peer=[load_s for each in every for load_s in each.load_s],
        ),
    ]


def measure_prefetch(scale: Scale) -> list[Figure]:
    """A copy in host memory, fetched while the engine generates on another core."""
    settings = {"mode": "cpu_prefetch", "keep_copy": True, "sources": [{"transport": "nixl"}]}
    cores: Sequence[int] = ()
    if scale.device == "cpu":
        cores, settings["fetch_cores"] = [0], [1]
    pauses, alone, meanwhile, plain, prefetches = [], [], [], [], []
    with ExitStack() as stack:
        trainer = stack.enter_context(trainer_of(scale))
        reader = stack.enter_context(_reader(scale, "reader", 0, 1))
        checkpoint = trainer.ask("publish", transport="path", version="start-cpu_prefetch")
        engine = stack.enter_context(engine_on(scale, checkpoint, settings, cores))
        for number in range(scale.rounds + 1):
            source = trainer.ask("publish", transport="nixl", version=f"{number}")
            before = engine.ask("generate", seconds=GENERATE_S)
            during = engine.ask("generate_while_prefetching", source=source, seconds=GENERATE_S)
            trainer.ask("done", readers=int(during["prefetches"]))
            memcpy_s = reader.ask("memcpy")
            numbers = engine.ask("command", name="load", source=source)["last_load"]["numbers"]
            process_s = _total(numbers, "process_s") if scale.device == "cpu" else 0.0
            say(
                f"  cpu_prefetch round {number}: {_parts(numbers)}; plain {memcpy_s:.3f} s; ms per token {before:.2f} "
                f"alone, {during['ms_per_token']:.2f} during {during['prefetches']} prefetches"
            )
            if number:
                pauses.append(numbers["seconds"] - process_s)
                plain.append(memcpy_s)
                alone.append(before)
                meanwhile.append(during["ms_per_token"])
                prefetches.append(during["prefetches"])
    slowdown_note = f"prefetches of {scale.weight_bytes / 1e9:.2f} GB by nixl in {GENERATE_S:g} s: {prefetches}"
    return [
        Figure(goal=goal_of("cpu_prefetch_pause_ratio"), ours=pauses, peer=plain),
        Figure(goal=goal_of("prefetch_slowdown"), ours=meanwhile, peer=alone, notes=[slowdown_note]),
    ]


def measure_nixl(scale: Scale) -> list[Figure]:
    """Two trainer ranks with shards, two generators that need everything, each in a process of its own."""
    read, busiest, shares, needed = [], [], [], []
    with ExitStack() as stack:
        trainers = [stack.enter_context(each) for each in _trainer_ranks(scale)]
        readers = [
            stack.enter_context(_reader(scale, f"reader-{rank}", rank, NIXL_RANKS)) for rank in range(NIXL_RANKS)
        ]
        for number in range(scale.rounds + 1):
            source = ask_all(trainers, "publish", transport="nixl", version=f"{number}")[0]
            loads = ask_all(readers, "ours", source=source)
            ask_all(trainers, "done", readers=NIXL_RANKS)
            by_producer: dict[str, int] = {}
            for load in loads:
                for producer, nbytes in load["by_producer"].items():
                    by_producer[producer] = by_producer.get(producer, 0) + nbytes
            total = sum(by_producer.values())
            say(
                f"  nixl 2:2 round {number}: {[round(load['seconds'], 3) for load in loads]} s, per producer "
                f"{ {producer: round(nbytes / 1e6, 1) for producer, nbytes in sorted(by_producer.items())} } MB"
            )
            if number:
                read.append(total / 1e6)
                busiest.append(max(by_producer.values()) / 1e6)
                shares.append(total / NIXL_RANKS / 1e6)
                needed.append(NIXL_RANKS * scale.weight_bytes / 1e6)
    return [
        Figure(goal=goal_of("nixl_bytes_ratio"), ours=read, peer=needed),
        Figure(goal=goal_of("nixl_evenness"), ours=busiest, peer=shares),
    ]


def say(text: str) -> None:
    print(text, flush=True)


@contextmanager
def _plain_transfer(trainer: Talker, reader: Talker, transport: str) -> Iterator[Any]:
    """A function of a source: the seconds of one plain transfer of as many bytes by the same transport."""
    if transport not in ("nixl", IN_HOST):
        yield lambda source: reader.ask(transport, source=source)
        return
    offer = trainer.ask("offer_plainly", transport=transport)
    try:
        yield lambda _source: reader.ask("nixl", offer=offer)
    finally:
        reader.ask("forget_nixl")
        trainer.ask("withdraw")


@contextmanager
def volume(scale: Scale) -> Iterator[str]:
    """The address of its master; nothing where no part of the run needs one."""
    if "store" not in scale.transports:
        yield ""
        return
    capacity = int(VOLUME_FACTOR * scale.weight_bytes) + (64 << 20)
    with running_volume(scale.folder, capacity_bytes=capacity, lease_s=LEASE_S) as running:
        yield running.volume.master


def trainer_of(scale: Scale) -> Any:
    model = scale.folder / "model"
    model.mkdir(exist_ok=True)
    (model / "config.json").write_text(json.dumps(SHAPES[scale.shape].config()), encoding="utf-8")
    arguments = [scale.shape, scale.device, str(scale.folder)]
    return talking("trainer", "trainer", arguments, folder=scale.folder, environment=scale.ucx)


def _trainer_ranks(scale: Scale) -> Iterator[Any]:
    (port,) = free_ports(1)
    for rank in range(NIXL_RANKS):
        group = {"RANK": f"{rank}", "WORLD_SIZE": f"{NIXL_RANKS}", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": f"{port}"}
        arguments = [scale.shape, scale.device, str(scale.folder)]
        yield talking(f"trainer-{rank}", "trainer", arguments, folder=scale.folder, environment={**scale.ucx, **group})


def _reader(scale: Scale, name: str, rank: int, ranks: int) -> Any:
    arguments = [scale.shape, scale.device, f"{rank}", f"{ranks}"]
    return talking(name, "plain", arguments, folder=scale.folder, environment=scale.ucx)


def engine_on(
    scale: Scale, checkpoint: Mapping[str, Any], settings: Mapping[str, Any], cores: Sequence[int] = ()
) -> Any:
    """An engine that starts with a published version; on these CPU cores alone, if any are named."""
    arguments = [checkpoint["path"], json.dumps(settings), *map(str, cores)]
    on_device = CPU_ENGINE if scale.device == "cpu" else {}
    threads = {"OMP_NUM_THREADS": f"{len(cores)}"} if cores else {}
    everything = {**ENGINE, **on_device, **scale.ucx, **threads}
    return talking("engine", "engine", arguments, folder=scale.folder, environment=everything)


def _total(numbers: Mapping[str, Any], part: str) -> float:
    return sum(float(group[part]) for group in numbers["groups"])


def _parts(numbers: Mapping[str, Any]) -> str:
    """Where the time of a load went."""
    named: Sequence[tuple[str, float]] = (
        ("opening", numbers["open_s"]),
        ("waiting", _total(numbers, "wait_s")),
        ("transfer", _total(numbers, "transfer_s")),
        ("copying", _total(numbers, "copy_s")),
        ("repacking", _total(numbers, "process_s")),
    )
    return f"load {numbers['seconds']:.3f} s: " + ", ".join(f"{name} {seconds:.3f}" for name, seconds in named)
