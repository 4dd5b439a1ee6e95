"""The pool as an engine in one epoch sees it: only that epoch's keys are there, and without an epoch there are none.

`epoch_store.py` puts it between vLLM's store connector and Mooncake's client. vLLM goes on building keys
`<cache_prefix>@...`; here they become `<cache_prefix>.<epoch>@...`. A transfer is for one request and keeps to its
epoch from its first call to its last, whatever the engine moves to meanwhile.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from connectors.vllm_plugin.pool_keys import begins_with, epoch_prefix, job_prefix

PRESENT, ABSENT = 1, 0
"""As batch_is_exist answers."""
NOT_FOUND = -704
"""Mooncake's code for a key that is not there."""


class OutsideEpoch(Exception):
    """Something was to be written that belongs to no epoch."""


@dataclass(frozen=True, slots=True)
class _Scope:
    """What the keys of a call belong to."""

    epoch: int | None
    saves: bool


class EpochView:
    """Has those methods of MooncakeDistributedStore that vLLM's store connector calls, and no others: one that is not
    known here would pass by the epoch. Used by the worker's thread and by each transfer thread at once."""

    def __init__(self, store: Any, cache_prefix: str) -> None:
        self._store = store
        self._cache_prefix = cache_prefix
        self._epoch: int | None = None
        self._of_thread = threading.local()

    def move(self, epoch: int | None) -> None:
        """See another epoch from now on; None: nothing."""
        self._epoch = epoch

    @contextmanager
    def transfer(self, epoch: int | None, *, saves: bool) -> Iterator[None]:
        """What this thread does in here is for a request of `epoch`. It happens in that epoch, or not at all where the
        engine is not in it: nothing is found to load, and nothing needs to be saved."""
        self._of_thread.scope = _Scope(epoch if epoch == self._epoch else None, saves)
        try:
            yield
        finally:
            del self._of_thread.scope

    def batch_is_exist(self, keys: Sequence[str]) -> list[int]:
        scope = self._scope()
        if scope.epoch is None:
            # A save skips what is there already, and counts it as done.
            return [PRESENT if scope.saves else ABSENT] * len(keys)
        found: list[int] = self._store.batch_is_exist(self._named(keys, scope.epoch))
        return found

    def batch_put_from_multi_buffers(
        self, keys: Sequence[str], addresses: Any, sizes: Any, replicate_config: Any
    ) -> list[int]:
        scope = self._scope()
        if scope.epoch is None:
            raise OutsideEpoch(f"{len(keys)} keys were to be put while the engine is in no epoch of theirs")
        put: list[int] = self._store.batch_put_from_multi_buffers(
            self._named(keys, scope.epoch), addresses, sizes, replicate_config
        )
        return put

    def batch_get_into_multi_buffers(self, keys: Sequence[str], addresses: Any, sizes: Any) -> list[int]:
        scope = self._scope()
        if scope.epoch is None:
            return [NOT_FOUND] * len(keys)
        got: list[int] = self._store.batch_get_into_multi_buffers(self._named(keys, scope.epoch), addresses, sizes)
        return got

    def batch_get_replica_desc(self, keys: Sequence[str]) -> dict[str, Any]:
        scope = self._scope()
        if scope.epoch is None:
            return {}
        named = self._named(keys, scope.epoch)
        described = self._store.batch_get_replica_desc(named)
        return {key: described[name] for key, name in zip(keys, named, strict=True) if name in described}

    def remove_all(self, force: bool = False) -> int:
        """What vLLM's reset of the external cache runs. The pool is not this engine's alone."""
        scope = self._scope()
        if scope.epoch is None:
            return 0
        removed: int = self._store.remove_by_regex(begins_with(epoch_prefix(self._cache_prefix, scope.epoch)), force)
        return removed

    def register_buffer(self, address: int, length: int) -> int:
        code: int = self._store.register_buffer(address, length)
        return code

    def close(self) -> None:
        self._store.close()

    def _scope(self) -> _Scope:
        """That of the thread's transfer; outside of one, as in look-ups, that of the engine."""
        scope: _Scope = getattr(self._of_thread, "scope", None) or _Scope(self._epoch, saves=False)
        return scope

    def _named(self, keys: Sequence[str], epoch: int) -> list[str]:
        plain, prefix = job_prefix(self._cache_prefix), epoch_prefix(self._cache_prefix, epoch)
        return [prefix + key.removeprefix(plain) for key in keys]
