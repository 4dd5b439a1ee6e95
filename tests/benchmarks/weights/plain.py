"""A reader without vLLM: the plain transfers that loads are compared with, and our transports alone.

Answers `talker.py`'s questions, each with seconds. Its memory is touched and registered before the clock starts.
"""

from __future__ import annotations

import base64
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from connectors.vllm_plugin.weights.settings import WeightSettings
from connectors.vllm_plugin.weights.transports import make_transport
from connectors.weights.source import Target, Transport
from connectors.weights.store_client import RangeRead, StoreClient, Volume, batches
from connectors.weights.store_layout import Manifest
from connectors.weights.tensors import Piece
from tests.benchmarks.weights.shapes import SHAPES, Shape
from tests.benchmarks.weights.talker import answer_questions, own_output

TIMEOUT_S = 120.0


class Reader:
    def __init__(self, shape: Shape, device: str, rank: int, ranks: int) -> None:
        sizes = shape.tensors()
        self._rank, self._ranks = rank, ranks
        self._memory = torch.ones(sum(_nbytes(size) for size in sizes.values()), dtype=torch.uint8, device=device)
        # Mooncake and files bring bytes to host memory; for a GPU one pinned copy follows.
        on_gpu = self._memory.is_cuda
        self._host = torch.ones(len(self._memory), dtype=torch.uint8, pin_memory=True) if on_gpu else self._memory
        self._groups = [[Piece(name, tuple((0, n) for n in sizes[name])) for name in group] for group in shape.groups()]
        self._targets = self._room()
        self._transports: dict[str, Transport] = {}
        self._store: StoreClient | None = None
        self._nixl: Any = None

    def memcpy(self) -> float:
        """Tensor by tensor, from host memory (pinned where there is a GPU)."""
        targets = [target.into.view(-1).view(torch.uint8) for group in self._targets for target in group]
        source = self._host if self._memory.is_cuda else torch.ones_like(self._memory)
        sources = source.split([into.nbytes for into in targets])
        self._synchronize()
        began = time.perf_counter()
        for into, part in zip(targets, sources, strict=True):
            into.copy_(part, non_blocking=True)
        self._synchronize()
        return time.perf_counter() - began

    def nixl(self, offer: Mapping[str, Any]) -> float:
        """One large read."""
        if self._nixl is None:
            self._nixl = _prepare_read(self._memory, offer)
        agent, handle = self._nixl
        began = time.perf_counter()
        state = agent.transfer(handle)
        while state == "PROC":
            state = agent.check_xfer_state(handle)
        if state != "DONE":
            raise RuntimeError(f"the plain read ended as {state}")
        return time.perf_counter() - began

    def forget_nixl(self) -> None:
        self._nixl = None

    def store(self, source: Mapping[str, Any]) -> float:
        """All objects of a version by `batch_get_into`, as much in one call as ends within their lease."""
        if self._store is None:
            volume = Volume(master=source["master"], protocol="tcp", host=None, devices=(), lend_bytes=0)
            self._store = StoreClient(volume)
        self._store.register([self._host])
        manifest = Manifest.decode(self._store.text(source["manifest"]))
        reads, start = [], 0
        for name, meta in manifest.metas.items():
            for stored in manifest.pieces[name]:
                nbytes = _nbytes(stored.shape, meta.dtype)
                reads.append(RangeRead(stored.key, 0, self._host[start : start + nbytes]))
                start += nbytes
        began = time.perf_counter()
        for batch in batches(reads):
            pointers, sizes = [read.into.data_ptr() for read in batch], [read.into.nbytes for read in batch]
            if self._store.mooncake.batch_get_into([read.key for read in batch], pointers, sizes) != sizes:
                raise RuntimeError("the plain read failed")
        self._to_device()
        return time.perf_counter() - began

    def path(self, source: Mapping[str, Any]) -> float:
        """All files of a version, one after the other."""
        rest = self._host.numpy().data
        files = sorted(Path(source["path"]).glob("*.safetensors"))
        began = time.perf_counter()
        for file in files:
            with file.open("rb", buffering=0) as content:
                content.seek(8 + int.from_bytes(content.read(8), "little"))
                while count := content.readinto(rest):
                    rest = rest[count:]
        self._to_device()
        return time.perf_counter() - began

    def ours(self, source: Mapping[str, Any]) -> Mapping[str, Any]:
        """One load by our transport, without an engine."""
        name = source["transport"]
        if name not in self._transports:
            self._transports[name] = make_transport(
                name,
                settings=WeightSettings(),
                rank=self._rank,
                ranks=self._ranks,
                name_of_rank=f"plain-{self._rank}",
            )
        began = time.perf_counter()
        fetch = self._transports[name].open(source, lambda manifest: self._groups, timeout_s=TIMEOUT_S)
        opened = time.perf_counter()
        by_producer: dict[str, int] = {}
        fetch.start(0, self._targets[0])
        for group, targets in enumerate(self._targets):
            if group + 1 < len(self._targets):
                fetch.start(group + 1, self._targets[group + 1])
            moved = fetch.fetch(group, targets)
            for producer, nbytes in moved.by_producer.items():
                by_producer[producer] = by_producer.get(producer, 0) + nbytes
        fetch.close()
        seconds = time.perf_counter() - began
        return {"seconds": seconds, "open_s": opened - began, "by_producer": by_producer}

    def _room(self) -> list[list[Target]]:
        groups, start = [], 0
        for group in self._groups:
            targets = []
            for piece in group:
                nbytes = _nbytes(piece.shape)
                into = self._memory[start : start + nbytes].view(torch.bfloat16).view(piece.shape)
                targets.append(Target(piece, into, stays=True))
                start += nbytes
            groups.append(targets)
        return groups

    def _to_device(self) -> None:
        if self._memory.is_cuda:
            self._memory.copy_(self._host, non_blocking=True)
            self._synchronize()

    def _synchronize(self) -> None:
        if self._memory.is_cuda:
            torch.cuda.synchronize()


def _nbytes(shape: tuple[int, ...], dtype: str = "bfloat16") -> int:
    return torch.Size(shape).numel() * int(getattr(torch, dtype).itemsize)


def _prepare_read(memory: torch.Tensor, offer: Mapping[str, Any]) -> tuple[Any, Any]:
    from nixl._api import nixl_agent, nixl_agent_config

    agent = nixl_agent("plain-reader", nixl_agent_config())
    agent.register_memory([memory])
    producer = agent.add_remote_agent(base64.b64decode(offer["agent"]))
    here = agent.get_xfer_descs([memory])
    there = agent.get_xfer_descs([(offer["address"], offer["nbytes"], offer["device"])], offer["memory"])
    return agent, agent.initialize_xfer("READ", here, there, producer)


def main() -> None:
    replies = own_output()
    shape, device, rank, ranks = SHAPES[sys.argv[1]], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
    torch.set_num_threads(1)
    reader = Reader(shape, device, rank, ranks)
    names = ("memcpy", "nixl", "forget_nixl", "store", "path", "ours")
    answer_questions({name: getattr(reader, name) for name in names}, replies)


if __name__ == "__main__":
    main()
