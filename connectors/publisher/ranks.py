"""What the ranks of a trainer tell each other around a publication: small Python objects over torch.distributed.

The publishers of this folder use it; weights never pass through it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TypeVar, cast

import torch
from torch import distributed, nn

from connectors.publisher.shares import shares
from connectors.weights.holdings import Holding, holdings
from connectors.weights.tensors import TensorMeta, digest_of

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


def own_share(
    ranks: Ranks, source: nn.Module | Mapping[str, torch.Tensor]
) -> tuple[dict[str, TensorMeta], list[Holding]]:
    """All tensors, in rank 0's order on all ranks, and which holdings this rank has to write. PublishError on all ranks
    where they don't have the same tensors, or not whole together."""
    metas, held = ranks.each(lambda: holdings(source))
    told = ranks.gather((digest_of(metas), [holding.piece for holding in held]))
    others = [f"rank {rank}" for rank, (digest, _) in enumerate(told) if digest != told[0][0]]
    if others:
        raise PublishError(f"{', '.join(others)}: other names, shapes or dtypes of tensors than on rank 0")
    metas = ranks.first(lambda: metas)
    mine = set(ranks.each(lambda: shares(metas, [pieces for _, pieces in told]))[ranks.rank])
    return metas, [holding for holding in held if holding.piece in mine]


def _nothing() -> None:
    return None
