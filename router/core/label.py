"""What a reply says about its own making: replicas, epochs, weight versions.

`flow.py` writes down each grant that it uses; headers go out with the first byte, the label (for clients that ask for
it with `return_headrace`) with the last. A reply is of a single version if and only if every leg that it is made from
ran in one epoch.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import lru_cache

import msgspec

from router.core.asks import Grant, Reason
from router.settings import EngineRole

HEADER_PREFIX = "x-headrace-"

_Used = tuple[EngineRole, str, Reason, int, str]
"""Of a grant: role, replica, reason, epoch, version."""


class Making:
    """The legs of the present attempt, and the epochs of those whose tokens the client already has."""

    __slots__ = ("_delivered", "_used", "attempts", "kept")

    def __init__(self) -> None:
        self.attempts = 0
        """All of them, also those that the client has nothing from."""
        self.kept = False
        """A leg of it went on while weights were replaced under it."""
        self._used: tuple[_Used, ...] = ()
        self._delivered: tuple[_Used, ...] = ()

    def begin_attempt(self) -> None:
        self.attempts += 1
        self._used = ()

    def add(self, grant: Grant) -> None:
        self._used += ((grant.role, grant.replica, grant.reason, grant.epoch, grant.version),)

    def delivered(self) -> None:
        """The client has tokens of this attempt: its versions are part of the reply whatever comes."""
        self._delivered += self._used

    def headers(self) -> tuple[tuple[str, str], ...]:
        return _headers(self._used, self._delivered, self.kept) if self._used or self._delivered else ()

    def label(self) -> bytes:
        return joined_label([self])

    def versions(self) -> dict[int, str]:
        """Version by epoch, of all that the reply is made from."""
        return _versions((*self._delivered, *self._used))

    def replicas(self) -> dict[str, str]:
        """Who made which part."""
        return {part: replica for part, replica, _ in _parts(self._used)}


def joined_label(makings: Sequence[Making]) -> bytes:
    """The label of a reply that is made from several: the replicas of the first, the versions and attempts of all."""
    versions = {epoch: version for making in makings for epoch, version in making.versions().items()}
    replicas = makings[0].replicas()
    label = {
        "prefill": replicas.get("prefill"),
        "decode": replicas.get("decode"),
        "epochs": list(versions),
        "weight_versions": list(versions.values()),
        "single_version": len(versions) == 1 and not any(making.kept for making in makings),
        "attempts": sum(making.attempts for making in makings),
    }
    return msgspec.json.encode(label)


def joined_headers(makings: Sequence[Making]) -> tuple[tuple[str, str], ...]:
    """The same in headers."""
    first, *others = makings
    rest = tuple(used for making in others for used in (*making._delivered, *making._used))
    return _headers(first._used, (*first._delivered, *rest), any(making.kept for making in makings))


@lru_cache(maxsize=4096)
def _headers(used: tuple[_Used, ...], delivered: tuple[_Used, ...], kept: bool) -> tuple[tuple[str, str], ...]:
    parts, versions = _parts(used), _versions((*delivered, *used))
    return (
        *((f"x-headrace-{part}", replica) for part, replica, _ in parts),
        ("x-headrace-choice", ", ".join(f"{part}={reason}" for part, _, reason in parts)),
        ("x-headrace-epoch", ", ".join(map(str, versions))),
        ("x-headrace-weight-version", ", ".join(map(_plain, versions.values()))),
        ("x-headrace-single-version", "true" if len(versions) == 1 and not kept else "false"),
    )


def _parts(used: Iterable[_Used]) -> list[tuple[str, str, str]]:
    """(part, replica, reason), the last leg of each part."""
    found: dict[str, tuple[str, str]] = {}
    for role, replica, reason, _, _ in used:
        for part in ("prefill", "decode") if role == "colocated" else (role,):
            found[part] = (replica, reason)
    return [(part, replica, reason) for part, (replica, reason) in found.items()]


def _versions(used: Iterable[_Used]) -> dict[int, str]:
    return {epoch: version for _, _, _, epoch, version in used}


def _plain(version: str) -> str:
    """A trainer's name as a header can carry it."""
    return version if version.isascii() and version.isprintable() else version.encode("unicode_escape").decode("ascii")
