"""Which stretches are read for a box."""

from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st

from connectors.weights.slabs import slabs, widened
from connectors.weights.tensors import Box, intersection, runs


@st.composite
def boxes(draw: st.DrawFn) -> tuple[Box, tuple[int, ...]]:
    shape = tuple(draw(st.lists(st.integers(1, 6), max_size=4)))
    ends = [sorted(draw(st.lists(st.integers(0, size), min_size=2, max_size=2, unique=True))) for size in shape]
    return tuple((start, stop) for start, stop in ends), shape


def count(box: Box) -> int:
    return math.prod(stop - start for start, stop in box)


def test_gaps_that_cost_less_than_a_read_are_read_along() -> None:
    assert widened(((2, 4), (10, 20)), (8, 30), max_gap=20) == ((2, 4), (0, 30))
    assert widened(((2, 4), (10, 20)), (8, 30), max_gap=19) == ((2, 4), (10, 20))
    assert widened(((2, 3), (10, 20)), (8, 30), max_gap=99) == ((2, 3), (10, 20)), "one stretch has no gaps"
    assert widened(((0, 2), (1, 3), (0, 5)), (2, 4, 5), max_gap=10) == ((0, 2), (0, 4), (0, 5))


@given(boxes(), st.integers(0, 50))
def test_a_widened_box_holds_the_box_and_never_has_more_stretches(drawn: tuple[Box, tuple[int, ...]], gap: int) -> None:
    box, shape = drawn
    wide = widened(box, shape, gap)
    assert intersection(wide, box) == box
    assert len(list(runs(wide, shape))) <= len(list(runs(box, shape)))


@given(boxes(), st.integers(1, 40))
def test_slabs_are_single_stretches_that_make_up_the_box(drawn: tuple[Box, tuple[int, ...]], most: int) -> None:
    box, shape = drawn
    parts = list(slabs(box, shape, most))
    assert all(count(part) <= most and len(list(runs(part, shape))) == 1 for part in parts)
    assert sum(count(part) for part in parts) == count(box)
    stretches = [next(runs(part, shape)) for part in parts]
    assert stretches == sorted(stretches)
    covered = {element for first, length in stretches for element in range(first, first + length)}
    assert covered == {element for first, length in runs(box, shape) for element in range(first, first + length)}
