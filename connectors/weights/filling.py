"""Fills tensors from what is stored row-major elsewhere: directly, or by way of a bounded staging buffer of two halves.

`path.py` and `store.py` say what is stored where and how ranges of bytes are read; `slabs.py` says which ranges.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
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
        """One more range costs as much as `range_cost_bytes` more bytes. `staging_bytes`: of each half."""
        self._range_cost_bytes = range_cost_bytes
        self._staging_bytes = _aligned(staging_bytes)
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
            size, on_gpu = 2 * self._staging_bytes, torch.cuda.is_available()
            self._staging = torch.empty(size, dtype=torch.uint8, pin_memory=on_gpu)
        return self._staging

    def _fill_staged(self, staged: Sequence[_Slab[K]], read: Callable[[Sequence[Read[K]]], None]) -> None:
        """One half of the buffer is read into while what is in the other goes to a GPU."""
        copies: list[list[torch.cuda.Event]] = [[], []]
        try:
            for number, batch in enumerate(_batches(staged, self._staging_bytes)):
                which = number % 2
                _wait_for(copies[which])
                placed = list(_placed(batch, self.staging[which * self._staging_bytes :]))
                read([slab.read(memory) for slab, memory in placed])
                copies[which] = _put(placed)
        finally:
            _wait_for([*copies[0], *copies[1]])


def _batches(staged: Iterable[_Slab[K]], limit_bytes: int) -> Iterator[list[_Slab[K]]]:
    batch: list[_Slab[K]] = []
    used = 0
    for slab in staged:
        if batch and used + slab.nbytes > limit_bytes:
            yield batch
            batch, used = [], 0
        batch.append(slab)
        used += _aligned(slab.nbytes)
    if batch:
        yield batch


def _placed(batch: Sequence[_Slab[K]], memory: torch.Tensor) -> Iterator[tuple[_Slab[K], torch.Tensor]]:
    start = 0
    for slab in batch:
        yield slab, memory[start : start + slab.nbytes]
        start += _aligned(slab.nbytes)


def _put(placed: Sequence[tuple[_Slab[K], torch.Tensor]]) -> list[torch.cuda.Event]:
    """What comes when the memory may be used again."""
    for slab, memory in placed:
        slab.put(memory)
    devices = {slab.part.into.device for slab, _ in placed if slab.part.into.is_cuda}
    return [torch.cuda.current_stream(device).record_event() for device in devices]


def _aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


def _wait_for(copies: Sequence[torch.cuda.Event]) -> None:
    for copy in copies:
        copy.synchronize()


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
