"""Publishes versions as objects in a Mooncake volume, every rank its own shards.

`store_layout.py` (`connectors/weights/`) says under which names; `connectors/weights/store.py` reads. The manifest
comes last. Older versions go when enough newer ones are whole, except for what somebody is reading just then: its
leases keep it, and it goes with one of the next publications.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass

import torch
from torch import distributed, nn

from connectors.publisher.ranks import PublishError, Ranks, own_share
from connectors.weights.filling import slices
from connectors.weights.holdings import Holding
from connectors.weights.source import SourceInfo
from connectors.weights.store_client import StoreClient, StoreError, Volume, memory_of
from connectors.weights.store_layout import (
    JOB_NAME,
    Manifest,
    StoredPiece,
    all_but,
    manifest_key,
    only,
    prefix_of,
    split,
)
from connectors.weights.tensors import TensorMeta, relative

MAX_OBJECT_BYTES = 64 << 20
STAGING_BYTES = 2 * MAX_OBJECT_BYTES
"""For shards that can't be put from where they are: on a GPU, or not contiguous."""


@dataclass(frozen=True)
class StorePublication:
    """A version in the volume. The trainer may overwrite its weights at once."""

    source: SourceInfo

    def wait_done(self, timeout_s: float, readers: int | None = None) -> None:
        """Nobody reads the trainer's memory."""


@dataclass(frozen=True, slots=True)
class _Object:
    """What this rank has to put."""

    stored: StoredPiece
    tensor: torch.Tensor


class StorePublisher:
    """Puts each version into the volume; called on all ranks alike. A job has one publisher at a time."""

    def __init__(self, volume: Volume, *, job: str, keep: int, group: distributed.ProcessGroup | None = None) -> None:
        """`keep`: how many of its newest versions stay loadable. The volume has to hold one more, and another one
        where versions follow each other faster than leases end. Versions of an earlier publisher of the same job stay
        until this one has published as many."""
        if not JOB_NAME.fullmatch(job) or keep < 1:
            raise ValueError(f"job {job!r} and keep {keep}: a name of letters, digits, '_', '-', '.', and at least 1")
        self._volume = volume
        self._job = job
        self._keep = keep
        self._ranks = Ranks(group)
        self._client = self._ranks.each(lambda: StoreClient(volume))
        self._numbers: list[str] = []
        self._staging: torch.Tensor | None = None

    def publish(self, source: nn.Module | Mapping[str, torch.Tensor], version: str) -> StorePublication:
        """Returns on all ranks when the version is whole in the volume. PublishError on all when one fails."""
        number = self._ranks.first(self._begin)
        metas, mine = own_share(self._ranks, source)
        objects = list(self._objects(number, metas, mine))
        try:
            self._ranks.each(lambda: self._put(objects))
            stored = self._ranks.gather([(name, each.stored) for name, each in objects])
            manifest = Manifest(version, metas, _by_tensor(entry for entries in stored for entry in entries))
            self._ranks.first(lambda: self._complete(number, manifest))
        except PublishError:
            self._ranks.first(lambda: self._discard(number))
            raise
        return StorePublication(
            {
                "transport": "store",
                "version": version,
                "master": self._volume.master,
                "protocol": self._volume.protocol,
                "manifest": manifest_key(self._job, number),
            }
        )

    def close(self) -> None:
        """What is published stays, unless this process lends the memory."""
        self._client.close()

    def _objects(
        self, number: str, metas: Mapping[str, TensorMeta], held: Sequence[Holding]
    ) -> Iterator[tuple[str, _Object]]:
        prefix = f"{prefix_of(self._job, number)}{self._ranks.rank}/"
        index = 0
        for holding in held:
            for box in split(metas[holding.piece.tensor], holding.piece.box, MAX_OBJECT_BYTES):
                part = holding.tensor[slices(relative(box, holding.piece.box))]
                yield holding.piece.tensor, _Object(StoredPiece(f"{prefix}{index}", box), part)
                index += 1

    def _put(self, objects: Sequence[tuple[str, _Object]]) -> None:
        direct = [each for _, each in objects if each.tensor.is_cpu and each.tensor.is_contiguous()]
        self._client.register(each.tensor for each in direct)
        # An optimizer that steps in place finds its parameters registered the next time.
        self._client.forget_all_but({memory_of(each.tensor) for each in direct})
        if direct:
            self._client.put([(each.stored.key, each.tensor) for each in direct])
        self._put_staged([each for _, each in objects if not (each.tensor.is_cpu and each.tensor.is_contiguous())])

    def _put_staged(self, objects: Sequence[_Object]) -> None:
        if not objects:
            return
        if self._staging is None:
            self._staging = torch.empty(STAGING_BYTES, dtype=torch.uint8, pin_memory=torch.cuda.is_available())
        self._client.register([self._staging])
        batch: list[tuple[str, torch.Tensor]] = []
        used = 0
        for each in objects:
            if used + each.tensor.nbytes > STAGING_BYTES:
                self._client.put(batch)
                batch, used = [], 0
            staged = self._staging[used : used + each.tensor.nbytes]
            staged.view(each.tensor.dtype).view(each.tensor.shape).copy_(each.tensor)
            batch.append((each.stored.key, staged))
            used += -(-each.tensor.nbytes // 64) * 64
        self._client.put(batch)

    def _begin(self) -> str:
        """The number of a new publication. What was read too lately to go at the last one may go now."""
        self._retire()
        return uuid.uuid4().hex

    def _complete(self, number: str, manifest: Manifest) -> None:
        self._client.put_text(manifest_key(self._job, number), manifest.encode())
        self._numbers = [*self._numbers, number][-self._keep :]
        # The version is there. What can't be removed now has to go before the next one.
        with suppress(StoreError):
            self._retire()

    def _retire(self) -> None:
        if len(self._numbers) == self._keep:
            self._client.remove_matching(all_but(self._job, self._numbers), even_if_read=False)

    def _discard(self, number: str) -> None:
        """Nobody reads it: its manifest isn't there."""
        with suppress(StoreError):
            self._client.remove_matching(only(self._job, number), even_if_read=True)


def _by_tensor(entries: Iterator[tuple[str, StoredPiece]]) -> dict[str, list[StoredPiece]]:
    pieces: dict[str, list[StoredPiece]] = {}
    for name, stored in entries:
        pieces.setdefault(name, []).append(stored)
    return pieces
