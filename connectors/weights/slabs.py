"""Which bytes of a stored tensor to read for a box: fewer, longer reads where gaps are small. Arithmetic only.

`filling.py` asks; what it reads beyond the box is cut off there.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from connectors.weights.tensors import Box


def widened(box: Box, shape: tuple[int, ...], max_gap: int) -> Box:
    """The box with inner dimensions made whole where at most `max_gap` elements lie between two of its stretches."""
    wide = list(box)
    inner = 1
    for axis in reversed(range(len(box))):
        start, stop = wide[axis]
        if (stop - start) < shape[axis]:
            outer = math.prod(last - first for first, last in box[:axis])
            gap = (shape[axis] - (stop - start)) * inner
            if outer == 1 or gap > max_gap:
                break
            wide[axis] = (0, shape[axis])
        inner *= shape[axis]
    return tuple(wide)


def slabs(box: Box, shape: tuple[int, ...], max_count: int) -> Iterator[Box]:
    """The box in slices of at most `max_count` elements, each one stretch of the stored tensor, in row-major order."""
    axis = next((axis for axis, (start, stop) in enumerate(box) if stop - start > 1), None)
    if axis is None:
        yield box
        return
    start, stop = box[axis]
    per_row = math.prod(last - first for first, last in box[axis + 1 :])
    is_one_stretch = all(box[inner] == (0, shape[inner]) for inner in range(axis + 1, len(box)))
    if is_one_stretch and (stop - start) * per_row <= max_count:
        yield box
        return
    step = max(1, max_count // per_row) if is_one_stretch else 1
    for first in range(start, stop, step):
        part = (*box[:axis], (first, min(first + step, stop)), *box[axis + 1 :])
        yield from slabs(part, shape, max_count)
