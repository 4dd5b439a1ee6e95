"""Strided regions of tensors and the boxes that they are, as arithmetic: no torch.

`recorder.py` sees regions, `plan.py` asks what they mean.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from connectors.weights.tensors import Box, intersection


@dataclass(frozen=True, slots=True)
class Region:
    """A view of a storage, in elements."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int

    @property
    def count(self) -> int:
        return math.prod(self.shape)


def row_major(shape: Sequence[int]) -> tuple[int, ...]:
    """Strides of a contiguous tensor."""
    return tuple(math.prod(shape[axis + 1 :]) for axis in range(len(shape)))


def box_of(region: Region, shape: Sequence[int], stride: Sequence[int], offset: int = 0) -> Box | None:
    """The part of a tensor of this layout that a region of its storage is; None where it is no box of it.

    The region's dimensions may stand in another order, and be joined or split: only the set of elements counts.
    """
    extents = [1] * len(shape)
    starts = _coordinates(region.offset - offset, shape, stride)
    if starts is None:
        return None
    axes = {stride[axis]: axis for axis in range(len(shape)) if shape[axis] > 1}
    for length, step in _joined(region):
        while length > 1:
            axis = axes.get(step)
            if axis is None or extents[axis] > 1:
                return None
            room = shape[axis] - starts[axis]
            if length <= room:
                extents[axis], length = length, 1
            elif starts[axis] == 0 and length % shape[axis] == 0:
                extents[axis] = shape[axis]
                length, step = length // shape[axis], step * shape[axis]
            else:
                return None
    return tuple((start, start + extent) for start, extent in zip(starts, extents, strict=True))


def _coordinates(offset: int, shape: Sequence[int], stride: Sequence[int]) -> list[int] | None:
    """Of the element at this offset."""
    found = [0] * len(shape)
    for axis in sorted(range(len(shape)), key=lambda axis: -stride[axis]):
        if shape[axis] > 1:
            found[axis] = offset // stride[axis]
            offset -= found[axis] * stride[axis]
            if found[axis] >= shape[axis]:
                return None
    return found if offset == 0 else None


def _joined(region: Region) -> list[tuple[int, int]]:
    """(length, step) of the dimensions that have more than one element, outermost first, neighbours joined."""
    joined: list[tuple[int, int]] = []
    dimensions = [(size, step) for size, step in zip(region.shape, region.stride, strict=True) if size > 1]
    for size, step in sorted(dimensions, key=lambda dimension: -dimension[1]):
        if joined and joined[-1][1] == size * step:
            joined[-1] = (joined[-1][0] * size, step)
        else:
            joined.append((size, step))
    return joined


def reordered(source: Region, into: Region, box: Box, stride: Sequence[int]) -> Region | None:
    """`into` with the dimensions of `box`, where element for element `source` is copied into `into` and `box` is what
    `source` is of a tensor with these strides. None where the copy does more than put dimensions into another order."""
    open_axes = [axis for axis in range(len(source.shape)) if source.shape[axis] > 1]
    strides: list[int] = []
    for (start, stop), step in zip(box, stride, strict=True):
        if stop - start == 1:
            strides.append(1)
            continue
        axis = next(
            (axis for axis in open_axes if (source.shape[axis], source.stride[axis]) == (stop - start, step)), None
        )
        if axis is None:
            return None
        open_axes.remove(axis)
        strides.append(into.stride[axis])
    if open_axes:
        return None
    return Region(tuple(stop - start for start, stop in box), tuple(strides), into.offset)


def overlap(boxes: Sequence[Box]) -> tuple[Box, Box] | None:
    """Two boxes of one tensor that share elements; None where there are none."""
    if len(boxes) > 1 and not boxes[0]:
        return boxes[0], boxes[1]
    running: list[Box] = []
    for box in sorted(boxes):
        running = [other for other in running if other[0][1] > box[0][0]]
        for other in running:
            if intersection(box, other):
                return other, box
        running.append(box)
    return None
