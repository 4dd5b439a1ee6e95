"""Which weights each epoch stands for, and the salt that keeps the epochs' KV apart.

An epoch is one attempt to install a weight version; its number only grows and is never used again. Versions are the
trainer's names, in no order of their own: "at least version X" means committed at or after X. `dispatcher.py` asks
which epochs will do, `flow.py` salts each leg at the moment it is sent.
"""

from __future__ import annotations

import hashlib

from connectors.vllm_plugin.pool_keys import epoch_salt

_SALT_BYTES = 20
_KEPT = 20_000
"""Epochs whose version is remembered (a week of one every 30 seconds); older names can't be asked for any more."""


class Epochs:
    """Epoch numbers and their versions, in the order of commitment."""

    def __init__(self) -> None:
        self._versions: dict[int, str] = {}
        self._first: dict[str, int] = {}
        """The first epoch of each version."""

    def commit(self, epoch: int, version: str, *, committed: int | None = None) -> None:
        """Make an epoch known; saying the same again changes nothing. Versions that were first served after the epoch
        `committed` were never committed: nothing counts as at least those any more."""
        if committed is not None and committed + 1 < epoch:
            self._first = {name: first for name, first in self._first.items() if not committed < first < epoch}
        if self._versions.setdefault(epoch, version) == version:
            self._first[version] = min(epoch, self._first.get(version, epoch))
        while len(self._versions) > _KEPT:
            oldest = min(self._versions)
            name = self._versions.pop(oldest)
            if self._first.get(name) == oldest:
                del self._first[name]

    def version_of(self, epoch: int) -> str:
        return self._versions.get(epoch, "")

    def first_with(self, version: str) -> int | None:
        """The epoch from which on "at least this version" is served; None while the version is unknown."""
        return self._first.get(version)

    def newest(self, count: int) -> dict[int, str]:
        """The versions of so many epochs."""
        return {epoch: self._versions[epoch] for epoch in sorted(self._versions)[-count:]}


class Salter:
    """`cache_salt` values: the epoch, and a keyed hash of job secret, epoch and the client's own salt.

    Equal client salts share a cache within one epoch, different ones never do, and nobody without the secret can
    name another epoch's. Engines read the epoch and keep its KV apart in the pool. Hexadecimal digits obey vLLM's
    limits (128 characters, no `@ / \\ NUL`).
    """

    def __init__(self, secret: bytes) -> None:
        self._secret = hashlib.blake2b(secret, digest_size=32, person=b"headrace-salt").digest()
        self._plain: tuple[int, str] = (-1, "")

    def salt(self, epoch: int, client_salt: str | None) -> str:
        if client_salt is not None:
            text = b"%d s %s" % (epoch, client_salt.encode("utf-8", "surrogatepass"))
            return epoch_salt(epoch, self._hash(text))
        if self._plain[0] != epoch:
            self._plain = (epoch, epoch_salt(epoch, self._hash(b"%d" % epoch)))
        return self._plain[1]

    def _hash(self, text: bytes) -> str:
        return hashlib.blake2b(text, key=self._secret, digest_size=_SALT_BYTES).hexdigest()
