"""A generator rank for tests: reads versions over one `NixlTransport`, without vLLM. Its orders:

    load source pause_s timeout_s     ("begun", None) after the first group, then ("loaded", {...}) or ("failed", text)

It needs all tensors whole, or its rows and columns of them, as tensor parallel ranks do.
"""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.connection import Connection
from typing import Any

import torch

from connectors.weights.nixl.transport import NixlTransport
from connectors.weights.source import FetchError, Target
from connectors.weights.tensors import Piece, TensorMeta


def needed(manifest: Mapping[str, TensorMeta], rank: int, ranks: int) -> list[list[Piece]]:
    """One group per layer, the rest first: `up` by rows, `down` by columns, all else whole."""
    groups: dict[str, list[Piece]] = {}
    for name, meta in manifest.items():
        box = list(meta.whole)
        axis = {"up": 0, "down": 1}.get(name.split(".")[-2] if "." in name else "")
        if axis is not None:
            size = meta.shape[axis]
            box[axis] = (size * rank // ranks, size * (rank + 1) // ranks)
        groups.setdefault(".".join(name.split(".")[:2]) if name.startswith("layers") else "", []).append(
            Piece(name, tuple(box))
        )
    return list(groups.values())


class Rank:
    """Keeps its transport, plan and targets over all loads."""

    def __init__(self, rank: int, ranks: int, kind: str) -> None:
        self.rank, self.ranks = rank, ranks
        self.kind = kind
        self.transport = NixlTransport(name=f"reader-{os.getpid()}", rank=rank, world_size=ranks)
        self.groups: list[list[Piece]] | None = None
        self.targets: list[list[Target]] = []

    def plan(self, manifest: Mapping[str, TensorMeta]) -> Sequence[Sequence[Piece]]:
        if self.groups is None:
            self.groups = needed(manifest, self.rank, self.ranks)
            self.targets = [[self.target(piece, manifest[piece.tensor]) for piece in group] for group in self.groups]
        return self.groups

    def target(self, piece: Piece, meta: TensorMeta) -> Target:
        dtype = getattr(torch, meta.dtype)
        if self.kind == "strided" and len(piece.shape) == 2:
            return Target(piece, torch.zeros(piece.shape[::-1], dtype=dtype).t(), stays=True)
        return Target(piece, torch.zeros(piece.shape, dtype=dtype), stays=self.kind != "passing")

    def load(self, source: Any, pause_s: float, timeout_s: float, begun: Callable[[], None]) -> dict[str, Any]:
        begin = time.monotonic()
        fetch = self.transport.open(source, self.plan, timeout_s=timeout_s)
        opened_s = time.monotonic() - begin
        nbytes, by_producer = 0, dict[str, int]()
        try:
            fetch.start(0, self.targets[0])
            for group, targets in enumerate(self.targets):
                if group + 1 < len(self.targets) and not pause_s:
                    fetch.start(group + 1, self.targets[group + 1])
                moved = fetch.fetch(group, targets)
                nbytes += moved.bytes
                for producer, count in moved.by_producer.items():
                    by_producer[producer] = by_producer.get(producer, 0) + count
                if group == 0:
                    begun()
                time.sleep(pause_s)
        finally:
            fetch.close()
        return {
            "seconds": time.monotonic() - begin,
            "open_s": opened_s,
            "planned": fetch.planned,
            "bytes": nbytes,
            "by_producer": by_producer,
            "digest": digest({t.piece: t.into for targets in self.targets for t in targets}),
        }


def digest(tensors: Mapping[Piece, torch.Tensor]) -> str:
    """Of all values, by name and box."""
    total = hashlib.sha256()
    for piece in sorted(tensors, key=lambda p: p.tensor):
        total.update(f"{piece}".encode())
        total.update(tensors[piece].contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return total.hexdigest()


def run(pipe: Connection, rank: int, ranks: int, kind: str) -> None:
    reader = Rank(rank, ranks, kind)
    while True:
        _, source, pause_s, timeout_s = pipe.recv()
        try:
            pipe.send(("loaded", reader.load(source, pause_s, timeout_s, lambda: pipe.send(("begun", None)))))
        except FetchError as error:
            pipe.send(("failed", str(error)))
