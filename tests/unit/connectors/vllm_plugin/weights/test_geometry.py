"""Regions and boxes, against what torch would make of them: every element is looked at."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from connectors.vllm_plugin.weights.geometry import Region, box_of, overlap, reordered, row_major
from connectors.weights.tensors import Box

SHAPES = st.lists(st.integers(1, 4), min_size=1, max_size=3).map(tuple)


def elements_of_region(region: Region) -> list[int]:
    """Offsets, in the order of the region's own dimensions."""
    return [
        region.offset + sum(index * step for index, step in zip(indices, region.stride, strict=True))
        for indices in itertools.product(*map(range, region.shape))
    ]


def elements_of_box(box: Box, stride: Sequence[int]) -> list[int]:
    return [
        sum(index * step for index, step in zip(indices, stride, strict=True))
        for indices in itertools.product(*(range(start, stop) for start, stop in box))
    ]


@st.composite
def boxes(draw: st.DrawFn) -> tuple[tuple[int, ...], Box]:
    shape = draw(SHAPES)
    box = []
    for size in shape:
        start = draw(st.integers(0, size - 1))
        box.append((start, draw(st.integers(start + 1, size))))
    return shape, tuple(box)


@given(boxes(), st.randoms())
def test_a_slice_in_any_order_of_dimensions_is_its_box(case: tuple[tuple[int, ...], Box], random: object) -> None:
    shape, box = case
    stride = row_major(shape)
    axes = list(range(len(shape)))
    random.shuffle(axes)  # type: ignore[attr-defined]
    region = Region(
        tuple(box[axis][1] - box[axis][0] for axis in axes),
        tuple(stride[axis] for axis in axes),
        sum(start * step for (start, _), step in zip(box, stride, strict=True)),
    )
    assert box_of(region, shape, stride) == box
    # The same slice into a tensor of the same layout: every element lands where it came from.
    moved = reordered(region, region, box, stride)
    assert moved is not None
    assert elements_of_region(moved) == elements_of_box(box, stride)


@given(SHAPES, st.integers(0, 40), st.lists(st.tuples(st.integers(1, 5), st.integers(0, 9)), max_size=3))
def test_what_is_called_a_box_has_the_same_elements(
    shape: tuple[int, ...], offset: int, dimensions: list[tuple[int, int]]
) -> None:
    region = Region(tuple(size for size, _ in dimensions), tuple(step for _, step in dimensions), offset)
    box = box_of(region, shape, row_major(shape))
    if box is not None:
        assert sorted(elements_of_region(region)) == elements_of_box(box, row_major(shape))


@pytest.mark.parametrize(
    ("region", "box"),
    [
        (Region((6, 4), (4, 1), 0), ((0, 2), (0, 3), (0, 4))),
        (Region((24,), (1,), 0), ((0, 2), (0, 3), (0, 4))),
        (Region((12,), (1,), 12), ((1, 2), (0, 3), (0, 4))),
        (Region((2, 2, 3, 2), (12, 2, 4, 1), 0), ((0, 2), (0, 3), (0, 4))),
        (Region((5,), (1,), 2), None),
        (Region((2,), (2,), 0), None),
        (Region((1,), (1,), 24), None),
    ],
)
def test_joined_and_split_dimensions(region: Region, box: Box | None) -> None:
    assert box_of(region, (2, 3, 4), (12, 4, 1)) == box


def test_a_copy_that_reshapes_is_no_reordering() -> None:
    whole = ((0, 2), (0, 3))
    assert reordered(Region((6,), (1,), 0), Region((6,), (1,), 0), whole, (3, 1)) is None


@given(st.lists(boxes().map(lambda case: (case[1] + ((0, 1),) * 3)[:3]), max_size=6))
def test_an_overlap_is_found_where_there_is_one(found: list[Box]) -> None:
    stride = (10000, 100, 1)
    counts = [element for box in found for element in elements_of_box(box, stride)]
    assert (overlap(found) is not None) == (len(counts) != len(set(counts)))
