"""What the ranks of a trainer tell each other around a publication: small Python objects over torch.distributed.

The publishers of this folder use it; weights never pass through it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar, cast

from torch import distributed

T = TypeVar("T")


class PublishError(Exception):
    """A version could not be published; the same on all ranks, with what each one says."""


class Ranks:
    """The ranks that publish together. One process without torch.distributed is one rank."""

    def __init__(self, group: distributed.ProcessGroup | None = None) -> None:
        """`group`: None for torch.distributed's default group, where there is one."""
        self._group = group
        self._alone = group is None and not (distributed.is_available() and distributed.is_initialized())
        self.rank = 0 if self._alone else distributed.get_rank(group)
        self.size = 1 if self._alone else distributed.get_world_size(group)

    def gather(self, value: T) -> list[T]:
        """Every rank's value, on every rank."""
        if self._alone:
            return [value]
        values = [value] * self.size
        distributed.all_gather_object(values, value, group=self._group)
        return values

    def each(self, call: Callable[[], T]) -> T:
        """What `call` returns on this rank, once all have ended theirs. PublishError on all when it fails on one."""
        try:
            outcome, failure = call(), None
        except Exception as error:
            outcome, failure = None, error
        said = self.gather(None if failure is None else f"{type(failure).__name__}: {failure}")
        if any(said):
            told = "; ".join(f"rank {rank}: {text}" for rank, text in enumerate(said) if text)
            raise PublishError(told) from failure
        return cast(T, outcome)

    def first(self, call: Callable[[], T]) -> T:
        """The same of rank 0 alone: what its `call` returns, on every rank."""
        return self.gather(self.each(call if self.rank == 0 else _nothing))[0]  # type: ignore[return-value]


def _nothing() -> None:
    return None
