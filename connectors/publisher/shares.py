"""Which rank writes which piece, where several hold the same one: each piece once, bytes even. Arithmetic only.

`path.py` and `store.py` of this folder ask; every rank comes to the same answer by itself.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from connectors.weights.tensors import ITEM_BYTES, Piece, TensorMeta


def shares(metas: Mapping[str, TensorMeta], held: Sequence[Sequence[Piece]]) -> list[list[Piece]]:
    """Per rank the pieces that it writes, from the pieces that each rank holds.

    ValueError with the names of tensors that are not whole in all of them together, or that overlap without being
    equal.
    """
    holders: dict[Piece, list[int]] = {}
    for rank, pieces in enumerate(held):
        for piece in pieces:
            holders.setdefault(piece, []).append(rank)
    _check_whole(metas, list(holders))
    loads = [0] * len(held)
    mine: list[list[Piece]] = [[] for _ in held]
    for piece in sorted(holders, key=lambda piece: (-piece.count, piece.tensor, piece.box)):
        rank = min(holders[piece], key=lambda each: (loads[each], each))
        loads[rank] += piece.count * ITEM_BYTES[metas[piece.tensor].dtype]
        mine[rank].append(piece)
    return mine


def _check_whole(metas: Mapping[str, TensorMeta], pieces: Sequence[Piece]) -> None:
    counts = dict.fromkeys(metas, 0)
    for piece in pieces:
        counts[piece.tensor] += piece.count
    wrong = sorted(name for name, meta in metas.items() if counts[name] != Piece(name, meta.whole).count)
    if wrong:
        raise ValueError(f"the ranks together don't hold these tensors once and whole: {', '.join(wrong)}")
