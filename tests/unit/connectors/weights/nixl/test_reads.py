"""Planned reads: every byte once, from who holds it, with the load even over those who hold the same."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from itertools import pairwise, product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from connectors.weights.nixl.reads import CUT_BYTES, Reader, ReadPlan, Region, plan_reads
from connectors.weights.tensors import Box, Piece, TensorMeta

ITEM = 4
SPACING = 1 << 40
"""Between the memories of two regions."""


def region(name: str, box: Box, address: int, order: tuple[int, ...] | None = None) -> Region:
    """A piece in memory, dense in some order of its dimensions."""
    shape = Piece(name, box).shape
    strides, step = [0] * len(shape), ITEM
    for axis in reversed(order or tuple(range(len(shape)))):
        strides[axis] = step
        step *= shape[axis]
    return Region(Piece(name, box), address, tuple(strides), "DRAM", 0)


def reader(index: int, count: int) -> Reader:
    """One of so many engines with one rank each."""
    return Reader(0, 1, index, count)


def cuts(draw: st.DrawFn, size: int) -> list[int]:
    return sorted({0, size, *draw(st.lists(st.integers(0, size), max_size=3))})


@st.composite
def held_tensor(draw: st.DrawFn) -> tuple[tuple[int, ...], list[list[Region]], Box]:
    """A tensor cut into a grid, each cell with one or several of the producers, and a box that is needed."""
    shape = tuple(draw(st.lists(st.integers(1, 6), min_size=1, max_size=3)))
    producers: list[list[Region]] = [[] for _ in range(4)]
    ends = [cuts(draw, size) for size in shape]
    for number, cell in enumerate(product(*(list(pairwise(e)) for e in ends))):
        order = tuple(draw(st.permutations(range(len(shape)))))
        for producer in draw(st.sets(st.integers(0, 3), min_size=1)):
            producers[producer].append(region("w", cell, (number * 4 + producer + 1) * SPACING, order))
    needed = tuple(tuple(sorted(draw(st.sets(st.integers(0, size), min_size=2, max_size=2)))) for size in shape)
    return shape, producers, needed  # type: ignore[return-value]


def element_at(producers: list[list[Region]], producer: int, address: int) -> tuple[int, ...]:
    """Which element of the tensor stands at an address."""
    number = address // SPACING
    (where,) = [r for r in producers[producer] if r.address // SPACING == number]
    left, index = address - where.address, [0] * len(where.strides)
    for axis in sorted(range(len(where.strides)), key=lambda a: (-where.strides[a], where.piece.shape[a] == 1)):
        if where.piece.shape[axis] > 1:
            index[axis], left = divmod(left, where.strides[axis])
    assert left == 0
    return tuple(start + i for (start, _), i in zip(where.piece.box, index, strict=True))


def check_exact(plan: ReadPlan, producers: list[list[Region]], needed: Box) -> None:
    assert plan.uncovered == ()
    shape = Piece("w", needed).shape
    (ways,) = plan.groups
    seen: Counter[int] = Counter()
    for way, runs in ways.items():
        for target, offset, address, length in zip(
            runs.targets, runs.offsets, runs.addresses, runs.lengths, strict=True
        ):
            assert target == 0
            for byte in range(0, length, ITEM):
                place, rest = (offset + byte) // ITEM, []
                seen[place] += 1
                for size in reversed(shape):
                    place, index = divmod(place, size)
                    rest.append(index)
                here = tuple(start + i for (start, _), i in zip(needed, reversed(rest), strict=True))
                assert element_at(producers, way.producer, address + byte) == here
    assert seen == Counter(range(math.prod(shape)))


@given(held_tensor(), st.integers(0, 4), st.integers(0, 4))
def test_every_byte_is_read_once_and_is_the_right_one(
    held: tuple[tuple[int, ...], list[list[Region]], Box], index: int, more: int
) -> None:
    shape, producers, needed = held
    plan = plan_reads(
        [[Piece("w", needed)]],
        tensors={"w": TensorMeta("float32", shape)},
        producers=producers,
        reader=reader(index, index + 1 + more),
    )
    check_exact(plan, producers, needed)


def test_a_scalar_is_read_whole() -> None:
    plan = plan_reads(
        [[Piece("s", ())]],
        tensors={"s": TensorMeta("float32", ())},
        producers=[[Region(Piece("s", ()), 64, (), "DRAM", 0)]],
        reader=reader(0, 1),
    )
    ((_, runs),) = plan.groups[0].items()
    assert (list(runs.addresses), list(runs.offsets), list(runs.lengths)) == ([64], [0], [4])


def test_what_nobody_holds_is_named() -> None:
    plan = plan_reads(
        [[Piece("w", ((0, 4),)), Piece("v", ((0, 2),))]],
        tensors={"w": TensorMeta("float32", (4,)), "v": TensorMeta("float32", (2,))},
        producers=[[region("w", ((0, 3),), SPACING)]],
        reader=reader(0, 1),
    )
    assert plan.uncovered == ("w", "v")


def test_whole_rows_are_one_run_and_columns_one_run_per_row() -> None:
    meta = {"w": TensorMeta("float32", (64, 64))}
    producers = [[region("w", ((0, 64), (0, 64)), SPACING)]]
    rows, columns = (
        plan_reads([[Piece("w", box)]], tensors=meta, producers=producers, reader=reader(0, 1)).groups[0]
        for box in (((8, 16), (0, 64)), ((0, 64), (8, 16)))
    )
    assert [list(r.lengths) for r in rows.values()] == [[8 * 64 * ITEM]]
    assert [list(r.lengths) for r in columns.values()] == [[8 * ITEM] * 64]


@given(st.integers(1, 5), st.integers(1, 4), st.integers(1, 9), st.booleans())
def test_blocks_are_contiguous_and_even(engines: int, ranks: int, holders: int, whole: bool) -> None:
    given_by: defaultdict[int, float] = defaultdict(float)
    for engine, rank in product(range(engines), range(ranks)):
        block = Reader(rank, ranks, engine * ranks, engines * ranks).block(holders, whole=whole)
        places = [place for place, _ in block]
        assert places == list(range(places[0], places[0] + len(places)))
        assert sum(fraction for _, fraction in block) == pytest.approx(1)
        for place, fraction in block:
            given_by[place] += fraction
    assert sorted(given_by) == list(range(holders))
    assert max(given_by.values()) == pytest.approx(min(given_by.values()))


@given(st.integers(1, 6), st.integers(1, 6))
def test_producers_that_hold_the_same_give_the_same(readers: int, holders: int) -> None:
    shapes = {f"layers.{n}": (1024, 512) for n in range(6)} | {f"norms.{n}": (512,) for n in range(13)}
    whole = {name: tuple((0, size) for size in shape) for name, shape in shapes.items()}
    producers = [
        [region(name, box, (1 + n) * SPACING) for n, (name, box) in enumerate(whole.items())] for _ in range(holders)
    ]
    given_by: Counter[int] = Counter()
    for index in range(readers):
        plan = plan_reads(
            [[Piece(name, box)] for name, box in whole.items()],
            tensors={name: TensorMeta("float32", shape) for name, shape in shapes.items()},
            producers=producers,
            reader=reader(index, readers),
        )
        for ways in plan.groups:
            for way, runs in ways.items():
                given_by[way.producer] += sum(runs.lengths)
    assert math.prod((1024, 512)) * ITEM > CUT_BYTES
    assert max(given_by.values()) <= 1.02 * min(given_by.values())
