"""Fills tensors from what is stored row-major elsewhere: directly, or by way of a bounded staging buffer.

`path.py` and `store.py` say what is stored where and how ranges of bytes are read; `slabs.py` says which ranges.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

import torch

from connectors.weights.slabs import slabs, widened
from connectors.weights.tensors import Box, Piece, intersection, relative, runs

K = TypeVar("K")
ALIGNMENT = 64


@dataclass(frozen=True, slots=True)
class Part(Generic[K]):
    """A box of something stored row-major, and the tensor that it fills."""

    stored: K
    shape: tuple[int, ...]
    """Of the whole that is stored."""
    box: Box
    into: torch.Tensor


@dataclass(frozen=True, slots=True)
class Read(Generic[K]):
    """A range of bytes to bring."""

    stored: K
    start: int
    into: torch.Tensor
    """A vector of bytes in host memory."""


@dataclass(frozen=True, slots=True)
class _Slab(Generic[K]):
    part: Part[K]
    box: Box
    """One stretch of what is stored; may hold more than the part's box."""

    @property
    def nbytes(self) -> int:
        return Piece("", self.box).count * int(self.part.into.element_size())

    def read(self, staging: torch.Tensor) -> Read[K]:
        (start, _), *more = runs(self.box, self.part.shape)
        assert not more, "a slab is one stretch"
        return Read(self.part.stored, start * self.part.into.element_size(), staging)

    def put(self, staging: torch.Tensor) -> None:
        wanted = intersection(self.box, self.part.box)
        assert wanted is not None, "a slab without anything of its part"
        values = staging.view(self.part.into.dtype).view(Piece("", self.box).shape)
        source = values[slices(relative(wanted, self.box))]
        self.part.into[slices(relative(wanted, self.part.box))].copy_(source, non_blocking=True)


class Filling(Generic[K]):
    """Reads parts with as few ranges as pay; keeps its staging buffer for the next time."""

    def __init__(self, *, range_cost_bytes: int, staging_bytes: int) -> None:
        """One more range costs as much as `range_cost_bytes` more bytes."""
        self._range_cost_bytes = range_cost_bytes
        self._staging_bytes = staging_bytes
        self._staging: torch.Tensor | None = None

    def fill(self, parts: Sequence[Part[K]], read: Callable[[Sequence[Read[K]]], None]) -> None:
        """`read` brings all that it is given before it returns."""
        direct: list[Read[K]] = []
        staged: list[_Slab[K]] = []
        for part in parts:
            wide = widened(part.box, part.shape, self._range_cost_bytes // part.into.element_size())
            if part.into.is_cpu and part.into.is_contiguous() and wide == part.box:
                direct.extend(_direct_reads(part))
            else:
                limit = self._staging_bytes // part.into.element_size()
                staged.extend(_Slab(part, box) for box in slabs(wide, part.shape, limit))
        if direct:
            read(direct)
        # Said here, because it holds for one thread alone, and reads with a time limit have their own.
        with torch.no_grad():
            self._fill_staged(staged, read)

    @property
    def staging(self) -> torch.Tensor:
        if self._staging is None:
            self._staging = torch.empty(self._staging_bytes, dtype=torch.uint8, pin_memory=torch.cuda.is_available())
        return self._staging

    def _fill_staged(self, staged: Sequence[_Slab[K]], read: Callable[[Sequence[Read[K]]], None]) -> None:
        batch: list[tuple[_Slab[K], torch.Tensor]] = []
        used = 0
        for slab in staged:
            if used + slab.nbytes > self._staging_bytes:
                _read_and_put(batch, read)
                batch, used = [], 0
            batch.append((slab, self.staging[used : used + slab.nbytes]))
            used += -(-slab.nbytes // ALIGNMENT) * ALIGNMENT
        if batch:
            _read_and_put(batch, read)


def _read_and_put(batch: Sequence[tuple[_Slab[K], torch.Tensor]], read: Callable[[Sequence[Read[K]]], None]) -> None:
    read([slab.read(staging) for slab, staging in batch])
    for slab, staging in batch:
        slab.put(staging)
    for device in {slab.part.into.device for slab, _ in batch if slab.part.into.is_cuda}:
        # The staging buffer is filled anew next.
        torch.cuda.current_stream(device).synchronize()


def byte_vector(tensor: torch.Tensor) -> torch.Tensor:
    """The memory of a contiguous tensor."""
    return tensor.reshape(-1).view(torch.uint8)


def slices(box: Box) -> tuple[slice, ...]:
    return tuple(slice(start, stop) for start, stop in box)


def _direct_reads(part: Part[K]) -> Iterator[Read[K]]:
    into, item, filled = byte_vector(part.into), part.into.element_size(), 0
    for start, count in runs(part.box, part.shape):
        yield Read(part.stored, start * item, into[filled : filled + count * item])
        filled += count * item
