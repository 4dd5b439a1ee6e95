"""The manifest of a version in a volume, and the names of its objects."""

from __future__ import annotations

import re
import zlib

import pytest

from connectors.weights.store_layout import Manifest, StoredPiece, all_but, only, prefix_of, split
from connectors.weights.tensors import Piece, TensorMeta

MANIFEST = Manifest(
    "step-7",
    {"w": TensorMeta("bfloat16", (4, 3)), "s": TensorMeta("float32", ())},
    {"w": [StoredPiece("k1", ((0, 2), (0, 3))), StoredPiece("k2", ((2, 4), (0, 3)))], "s": [StoredPiece("k3", ())]},
)


def test_a_manifest_survives_its_text() -> None:
    assert Manifest.decode(MANIFEST.encode()) == MANIFEST


@pytest.mark.parametrize("text", [b"", b"[]", b'{"version": "1"}', b'{"version": "1", "tensors": {"w": [1, 2, 3]}}'])
def test_other_text_is_no_manifest(text: bytes) -> None:
    for packed in (text, zlib.compress(text)):
        with pytest.raises(ValueError, match=r".*"):
            Manifest.decode(packed)


def test_a_manifest_of_many_ranks_is_small() -> None:
    names = [f"model.layers.{layer}.mlp.experts.{expert}.up_proj.weight" for layer in range(8) for expert in range(20)]
    pieces = {
        name: [StoredPiece(f"job/{'0f' * 16}/{rank}/{index}", ((rank, rank + 1), (0, 2048))) for rank in range(64)]
        for index, name in enumerate(names)
    }
    manifest = Manifest("1", dict.fromkeys(names, TensorMeta("bfloat16", (64, 2048))), pieces)
    assert len(manifest.encode()) < 8 * 64 * len(names)


def test_a_piece_is_found_in_the_objects_that_hold_a_part_of_it() -> None:
    found = [(stored.key, box) for stored, box in MANIFEST.holding(Piece("w", ((1, 3), (1, 2))))]
    assert found == [("k1", ((1, 2), (1, 2))), ("k2", ((2, 3), (1, 2)))]


def test_removal_matches_exactly_its_publications() -> None:
    keys = [prefix_of("job.1", number) + "0/0" for number in ("aa", "bb", "aab")] + ["jobx1/aa/0/0", "job.1"]
    assert [key for key in keys if re.search(all_but("job.1", ["aa"]), key)] == [keys[1], keys[2]]
    assert [key for key in keys if re.search(only("job.1", "aa"), key)] == [keys[0]]


def test_long_pieces_are_split_into_stretches() -> None:
    parts = list(split(TensorMeta("float32", (100, 10)), ((20, 27), (0, 10)), max_bytes=120))
    assert parts == [((20, 23), (0, 10)), ((23, 26), (0, 10)), ((26, 27), (0, 10))]
