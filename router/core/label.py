"""What a reply says about its own making: replicas, epochs, weight versions.

`flow.py` writes down each grant that it uses; headers go out with the first byte, the label (for clients that ask for
it with `return_headrace`) with the last. A reply is of a single version if and only if every leg that it is made from
ran in one epoch.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from router.core.asks import Grant


class _Label(msgspec.Struct, kw_only=True):
    prefill: str | None
    decode: str | None
    epochs: list[int]
    weight_versions: list[str]
    single_version: bool


class Making:
    """The legs of the present attempt, and of those whose tokens the client already has."""

    __slots__ = ("_delivered", "_reasons", "_served_by", "_versions")

    def __init__(self) -> None:
        self._served_by: dict[str, str] = {}
        self._reasons: dict[str, str] = {}
        self._versions: dict[int, str] = {}
        self._delivered: dict[int, str] = {}

    def begin_attempt(self) -> None:
        self._served_by, self._reasons = {}, {}
        self._versions = dict(self._delivered)

    def add(self, grant: Grant) -> None:
        for part in ("prefill", "decode") if grant.role == "colocated" else (grant.role,):
            self._served_by[part] = grant.replica
            self._reasons[part] = grant.reason
        self._versions[grant.epoch] = grant.version

    def replace(self, epoch: int, version: str) -> None:
        """The running leg goes on under other weights."""
        self._versions[epoch] = version

    def delivered(self) -> None:
        """The client has tokens of this attempt: its versions are part of the reply whatever comes."""
        self._delivered = dict(self._versions)

    def headers(self) -> tuple[tuple[str, str], ...]:
        if not self._versions:
            return ()
        replicas = [(f"x-headrace-{part}", name) for part, name in self._served_by.items()]
        return (
            *replicas,
            ("x-headrace-choice", ", ".join(f"{part}={why}" for part, why in self._reasons.items())),
            ("x-headrace-epoch", ", ".join(map(str, self._versions))),
            ("x-headrace-weight-version", ", ".join(map(_plain, self._versions.values()))),
        )

    def label(self) -> bytes:
        return joined_label([self])


def joined_label(makings: Sequence[Making]) -> bytes:
    """The label of a reply that is made from several: the replicas of the first, the versions of all."""
    versions = {epoch: version for making in makings for epoch, version in making._versions.items()}
    served_by = makings[0]._served_by
    label = _Label(
        prefill=served_by.get("prefill"),
        decode=served_by.get("decode"),
        epochs=list(versions),
        weight_versions=list(versions.values()),
        single_version=len(versions) == 1,
    )
    return msgspec.json.encode(label)


def _plain(version: str) -> str:
    """A trainer's name as a header can carry it."""
    return version if version.isascii() and version.isprintable() else version.encode("unicode_escape").decode("ascii")
