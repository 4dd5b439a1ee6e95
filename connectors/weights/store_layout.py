"""How a version lies in a Mooncake volume: the names of its objects, and the manifest that lists them. Pure.

Each object is one piece of a tensor, row-major. The manifest is put last, so a version is there whole or not at all.
Names hold a number that is never used again: what is read under a name that is still there afterwards was there
throughout.
"""

from __future__ import annotations

import json
import re
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from connectors.weights.slabs import slabs
from connectors.weights.tensors import ITEM_BYTES, Box, Piece, TensorMeta, intersection

JOB_NAME = re.compile(r"[A-Za-z0-9_.-]+")


@dataclass(frozen=True, slots=True)
class StoredPiece:
    """One object."""

    key: str
    box: Box
    """Of its tensor."""

    @property
    def shape(self) -> tuple[int, ...]:
        return Piece(self.key, self.box).shape


@dataclass(frozen=True, slots=True)
class Manifest:
    """One version in the volume."""

    version: str
    metas: Mapping[str, TensorMeta]
    pieces: Mapping[str, Sequence[StoredPiece]]
    """Per tensor."""

    def holding(self, piece: Piece) -> Iterator[tuple[StoredPiece, Box]]:
        """The objects that hold a part of a piece, each with that part."""
        for stored in self.pieces[piece.tensor]:
            common = intersection(stored.box, piece.box)
            if common is not None:
                yield stored, common

    def encode(self) -> bytes:
        tensors = {
            name: [meta.dtype, meta.shape, [[stored.key, stored.box] for stored in self.pieces.get(name, ())]]
            for name, meta in self.metas.items()
        }
        text = json.dumps({"version": self.version, "tensors": tensors}, separators=(",", ":")).encode()
        # A million objects of 64 ranks are 85 MB of it, 4 MB packed; Mooncake copies 16 MB at most.
        return zlib.compress(text, level=1)

    @classmethod
    def decode(cls, packed: bytes) -> Manifest:
        """ValueError for what `encode` did not make."""
        try:
            content: dict[str, Any] = json.loads(zlib.decompress(packed))
            metas, pieces = {}, {}
            for name, (dtype, shape, stored) in content["tensors"].items():
                metas[name] = TensorMeta(dtype, tuple(shape))
                pieces[name] = [StoredPiece(key, tuple((start, stop) for start, stop in box)) for key, box in stored]
            return cls(content["version"], metas, pieces)
        except (KeyError, TypeError, zlib.error) as error:
            raise ValueError(f"not a manifest: {error!r}") from error


def prefix_of(job: str, number: str) -> str:
    """What the names of one publication's objects begin with."""
    return f"{job}/{number}/"


def manifest_key(job: str, number: str) -> str:
    return prefix_of(job, number) + "manifest"


def only(job: str, number: str) -> str:
    """A regular expression for all objects of one publication."""
    return f"^{_literal(job)}/{number}/"


def all_but(job: str, numbers: Sequence[str]) -> str:
    """A regular expression for the objects of all publications of a job but these."""
    return f"^{_literal(job)}/(?!({'|'.join(numbers)})/)"


def _literal(job: str) -> str:
    # Not `re.escape`: Mooncake's dialect knows no escaped dashes. In a job's name only dots mean something else.
    return job.replace(".", "[.]")


def split(meta: TensorMeta, box: Box, max_bytes: int) -> Iterator[Box]:
    """A piece as boxes of at most `max_bytes`, each one stretch of it: an allocator finds room for small objects more
    easily, and they spread over storage clients."""
    local = Piece("", box)
    whole = tuple((0, size) for size in local.shape)
    for slab in slabs(whole, local.shape, max(1, max_bytes // ITEM_BYTES[meta.dtype])):
        yield tuple((first + start, first + stop) for (first, _), (start, stop) in zip(box, slab, strict=True))
