"""Who writes what, where several ranks hold the same."""

from __future__ import annotations

import pytest

from connectors.publisher.shares import shares
from connectors.weights.tensors import Piece, TensorMeta

METAS = {name: TensorMeta("float32", (4, 2)) for name in "abcd"}


def rows(name: str, start: int, stop: int) -> Piece:
    return Piece(name, ((start, stop), (0, 2)))


def test_shards_are_written_by_their_holders() -> None:
    held = [[rows(name, 0, 2) for name in METAS], [rows(name, 2, 4) for name in METAS]]
    assert [set(mine) for mine in shares(METAS, held)] == [set(pieces) for pieces in held]


def test_what_all_hold_is_spread_evenly_and_written_once() -> None:
    held = [[rows(name, 0, 4) for name in METAS]] * 2
    mine = shares(METAS, held)
    assert [len(pieces) for pieces in mine] == [2, 2]
    assert set(mine[0]) | set(mine[1]) == set(held[0])


def test_what_is_not_there_once_and_whole_is_named() -> None:
    with pytest.raises(ValueError, match=r"once and whole: b, c$"):
        shares(METAS, [[rows("a", 0, 4), rows("b", 0, 3), rows("c", 0, 4), rows("d", 0, 4)], [rows("c", 3, 4)]])
