"""Slices of checkpoint tensors: which part of which tensor, and where its bytes stand. Arithmetic only.

A checkpoint tensor is row-major and named as the trainer names it. The load plan (`vllm_plugin/weights/`) says which
pieces a rank needs, a trainer's layout which pieces each of its ranks holds; the transports meet both here.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

Box = tuple[tuple[int, int], ...]
"""(start, stop) per dimension; of a scalar: ()."""

ITEM_BYTES = {
    "float64": 8, "float32": 4, "bfloat16": 2, "float16": 2, "float8_e4m3fn": 1, "float8_e5m2": 1,
    "int64": 8, "int32": 4, "int16": 2, "int8": 1, "uint8": 1, "bool": 1,
}  # fmt: skip
"""Of torch's dtypes, by their names without `torch.`."""


@dataclass(frozen=True, slots=True)
class TensorMeta:
    """What a tensor is, without its values."""

    dtype: str
    """A key of `ITEM_BYTES`."""
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * ITEM_BYTES[self.dtype]

    @property
    def whole(self) -> Box:
        return tuple((0, size) for size in self.shape)


def digest_of(manifest: Mapping[str, TensorMeta]) -> str:
    """Tells manifests apart between processes, whatever the order of their tensors."""
    entries = sorted((name, meta.dtype, meta.shape) for name, meta in manifest.items())
    return hashlib.sha256(repr(entries).encode()).hexdigest()


@dataclass(frozen=True, slots=True)
class Piece:
    """A part of one checkpoint tensor."""

    tensor: str
    box: Box

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(stop - start for start, stop in self.box)

    @property
    def count(self) -> int:
        """Elements."""
        return math.prod(self.shape)


def intersection(one: Box, other: Box) -> Box | None:
    """What both boxes hold; None if nothing."""
    assert len(one) == len(other), "boxes of tensors of different rank"
    common = tuple((max(a[0], b[0]), min(a[1], b[1])) for a, b in zip(one, other, strict=True))
    return common if all(start < stop for start, stop in common) else None


def relative(box: Box, to: Box) -> Box:
    """A box in the coordinates of one that contains it."""
    return tuple((a[0] - b[0], a[1] - b[0]) for a, b in zip(box, to, strict=True))


def runs(box: Box, shape: tuple[int, ...]) -> Iterator[tuple[int, int]]:
    """(first element, elements) of each contiguous stretch of a box within a row-major tensor of this shape, in order.

    As few as there are: whole trailing dimensions are joined.
    """
    strides = [math.prod(shape[axis + 1 :]) for axis in range(len(shape))]
    axis = len(shape)
    while axis > 0 and box[axis - 1] == (0, shape[axis - 1]):
        axis -= 1
    # From `axis` on everything is whole; the last dimension that is not whole is one stretch.
    inner = max(axis - 1, 0)
    length = (box[inner][1] - box[inner][0]) * strides[inner] if shape else 1
    first = box[inner][0] * strides[inner] if shape else 0
    yield from _outer_runs(box[:inner], strides, first, length)


def _outer_runs(outer: Box, strides: list[int], first: int, length: int) -> Iterator[tuple[int, int]]:
    if not outer:
        yield first, length
        return
    (start, stop), stride = outer[0], strides[0]
    for index in range(start, stop):
        yield from _outer_runs(outer[1:], strides[1:], first + index * stride, length)
