"""Which bytes one reader takes from which producer: from boxes to runs of memory. Arithmetic only.

The layout of a version (`messages.py`, made by `server.py`) says what every producer has in memory, the load plan what
this reader needs; `transport.py` turns the result into NIXL descriptors, once.

Where several producers hold the same box they form a row, and each reader takes its own contiguous block of it. Of n
ranks in all engines rank i takes the stretch from i/n to (i+1)/n of what all ranks need, whole tensors. Slices are
needed by one rank of each engine, as tensor parallel ranks do: so it takes the stretch of its whole engine. With more
readers than holders several share one; where a block ends inside a holder, that holder gives the fraction. So load is
even over holders.
"""

from __future__ import annotations

from array import array
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from connectors.weights.tensors import ITEM_BYTES, Box, Piece, TensorMeta, intersection, relative

CUT_BYTES = 1 << 18
"""A slice at least this large is cut between the holders of a block; smaller ones go whole to whom the most is due."""


@dataclass(frozen=True, slots=True)
class Region:
    """A piece in a producer's memory."""

    piece: Piece
    address: int
    strides: tuple[int, ...]
    """Bytes per step of each dimension."""
    memory: str
    """NIXL's name: DRAM or VRAM."""
    device: int


@dataclass(frozen=True, slots=True)
class Reader:
    """One rank of one of the engines that load together."""

    rank: int
    """In its engine."""
    engine_ranks: int
    first: int
    """Number of the engine's rank 0 among the ranks of all engines."""
    count: int
    """Ranks of all engines."""

    def block(self, holders: int, *, whole: bool) -> list[tuple[int, float]]:
        """(position in the row of holders, fraction of the bytes) from which it reads a whole tensor, or else a
        slice."""
        start = self.first + (self.rank if whole else 0)
        stop = start + (1 if whole else self.engine_ranks)
        # In units of 1/(holders * count) of the row all ends are whole numbers.
        begin, end = start * holders, stop * holders
        return [
            (holder, (min(end, (holder + 1) * self.count) - max(begin, holder * self.count)) / (end - begin))
            for holder in range(begin // self.count, (end - 1) // self.count + 1)
        ]


@dataclass(frozen=True, slots=True)
class Way:
    """What one transfer has to have in common on the producer's side."""

    producer: int
    memory: str
    device: int


@dataclass(slots=True)
class Runs:
    """Contiguous stretches to read, as columns: they may be many."""

    targets: array[int] = field(default_factory=lambda: array("q"))
    """Which of the group's pieces."""
    offsets: array[int] = field(default_factory=lambda: array("q"))
    """Bytes into the piece, which stands dense and row-major."""
    addresses: array[int] = field(default_factory=lambda: array("Q"))
    """In the producer's memory."""
    lengths: array[int] = field(default_factory=lambda: array("q"))


@dataclass(frozen=True, slots=True)
class ReadPlan:
    """All that one reader reads of a version."""

    groups: tuple[Mapping[Way, Runs], ...]
    uncovered: tuple[str, ...]
    """Tensors of which some needed part is with no producer."""


@dataclass(frozen=True, slots=True)
class _Cell:
    """A part of a needed piece, and all who hold it."""

    box: Box
    holders: tuple[int, ...]
    regions: tuple[Region, ...]


def plan_reads(
    groups: Iterable[Sequence[Piece]],
    *,
    tensors: Mapping[str, TensorMeta],
    producers: Sequence[Sequence[Region]],
    reader: Reader,
) -> ReadPlan:
    """Every byte of every piece exactly once."""
    held = _by_tensor(producers)
    due = _Due(reader)
    uncovered: dict[str, None] = {}
    planned = []
    for pieces in groups:
        ways: dict[Way, Runs] = defaultdict(Runs)
        for target, piece in enumerate(pieces):
            item = ITEM_BYTES[tensors[piece.tensor].dtype]
            whole = piece.box == tensors[piece.tensor].whole
            cells, left = _cells(piece.box, held.get(piece.tensor, {}))
            if left:
                uncovered[piece.tensor] = None
            for cell in cells:
                for holder, box in due.split(cell, item, whole=whole):
                    region = cell.regions[holder]
                    way = Way(cell.holders[holder], region.memory, region.device)
                    _add_runs(ways[way], target, piece.box, region, box, item)
        planned.append(dict(ways))
    return ReadPlan(tuple(planned), tuple(uncovered))


_Holders = dict[Box, list[tuple[int, Region]]]


def _by_tensor(producers: Sequence[Sequence[Region]]) -> dict[str, _Holders]:
    held: dict[str, _Holders] = defaultdict(lambda: defaultdict(list))
    for producer, regions in enumerate(producers):
        for region in regions:
            held[region.piece.tensor][region.piece.box].append((producer, region))
    return held


def _cells(needed: Box, held: _Holders) -> tuple[list[_Cell], list[Box]]:
    """A needed box cut along what is held; and what nobody holds."""
    left = [needed]
    cells = []
    for box, holders in held.items():
        still: list[Box] = []
        for part in left:
            common = intersection(part, box)
            if common is None:
                still.append(part)
                continue
            cells.append(_Cell(common, tuple(p for p, _ in holders), tuple(r for _, r in holders)))
            still.extend(_without(part, common))
        left = still
    return cells, left


def _without(box: Box, hole: Box) -> Iterator[Box]:
    """What is left of a box around a box inside it, as boxes that do not overlap."""
    for axis, ((start, stop), (inner_start, inner_stop)) in enumerate(zip(box, hole, strict=True)):
        for side in ((start, inner_start), (inner_stop, stop)):
            if side[0] < side[1]:
                yield (*hole[:axis], side, *box[axis + 1 :])


class _Due:
    """Shares a reader's bytes out over the block of holders that is its own."""

    def __init__(self, reader: Reader) -> None:
        self._reader = reader
        self._due: dict[tuple[tuple[int, ...], bool], list[float]] = {}
        """Per row of holders, for whole tensors and for slices: bytes that each of the block should still give to have
        given its part so far."""

    def split(self, cell: _Cell, item: int, *, whole: bool) -> Iterator[tuple[int, Box]]:
        """(position in the row of holders, what to read there)."""
        block = self._reader.block(len(cell.holders), whole=whole)
        if len(block) == 1:
            yield block[0][0], cell.box
            return
        nbytes = item * Piece("", cell.box).count
        due = self._due.setdefault((cell.holders, whole), [0.0] * len(block))
        for place, (_, fraction) in enumerate(block):
            due[place] += fraction * nbytes
        axis = next((a for a, (start, stop) in enumerate(cell.box) if stop - start >= len(block)), None)
        if nbytes < CUT_BYTES or axis is None:
            place = max(range(len(block)), key=due.__getitem__)
            due[place] -= nbytes
            yield block[place][0], cell.box
            return
        start, stop = cell.box[axis]
        row = nbytes / (stop - start)
        for place, (holder, _) in enumerate(block):
            last = place == len(block) - 1
            rows = stop - start if last else min(max(round(due[place] / row), 0), stop - start)
            due[place] -= rows * row
            if rows:
                yield holder, (*cell.box[:axis], (start, start + rows), *cell.box[axis + 1 :])
            start += rows


def _add_runs(runs: Runs, target: int, needed: Box, region: Region, box: Box, item: int) -> None:
    """Append a box as the longest stretches that are contiguous on both sides."""
    here = _dense_strides(Piece("", needed).shape, item)
    sizes = [stop - start for start, stop in box]
    at_here = sum(start * step for (start, _), step in zip(relative(box, needed), here, strict=True))
    at_there = sum(
        start * step for (start, _), step in zip(relative(box, region.piece.box), region.strides, strict=True)
    )
    length, axis = item, len(sizes)
    while axis and (sizes[axis - 1] == 1 or here[axis - 1] == region.strides[axis - 1] == length):
        axis -= 1
        length *= sizes[axis]
    offsets, addresses = [at_here], [region.address + at_there]
    for outer in range(axis):
        steps = range(sizes[outer])
        offsets = [offset + step * here[outer] for offset in offsets for step in steps]
        addresses = [address + step * region.strides[outer] for address in addresses for step in steps]
    runs.targets.extend([target] * len(offsets))
    runs.offsets.extend(offsets)
    runs.addresses.extend(addresses)
    runs.lengths.extend([length] * len(offsets))


def _dense_strides(shape: tuple[int, ...], item: int) -> list[int]:
    strides = [item] * len(shape)
    for axis in range(len(shape) - 2, -1, -1):
        strides[axis] = strides[axis + 1] * shape[axis + 1]
    return strides
