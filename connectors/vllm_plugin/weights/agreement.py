"""All ranks of one engine tell each other something, within a time, before any of them acts on it or reports it.

Over the CPU groups that vLLM has anyway. A rank that does not come (stuck in a driver, killed) costs the others a
bounded time; which rank it was is in the error. After that the group's messages may be out of step, so `rank.py`
gives this life of the engine up: it is restarted. A rank that merely failed comes in time and says so.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch.distributed as dist
from vllm.distributed.parallel_state import get_pp_group, get_tp_group

T = TypeVar("T")


class AgreementLost(Exception):
    """Not every rank came. What it said of others after this cannot be believed."""


@dataclass(frozen=True)
class EngineRanks:
    """This rank among those of its engine."""

    rank: int
    size: int
    groups: Sequence[dist.ProcessGroup]
    """One after the other they reach every rank of the engine."""

    def gather(self, mine: T, wait_s: float) -> list[T]:
        """What every rank gave, in the same order on all. Raises AgreementLost."""
        known = [mine]
        for group in self.groups:
            parts: list[Any] = [None] * group.size()
            try:
                # Only the barrier takes a time of its own; when it is through, all are there to exchange at once.
                dist.monitored_barrier(group, timeout=timedelta(seconds=wait_s), wait_all_ranks=True)
                dist.all_gather_object(parts, known, group=group)
            except RuntimeError as error:
                raise AgreementLost(f"not every rank came within {wait_s:.0f} s: {error}") from error
            known = [each for part in parts for each in part]
        return known


def engine_ranks(world_size: int) -> EngineRanks:
    """Of this process. `world_size`: ranks of the engine as vLLM's parallel config counts them."""
    tensor, pipeline = get_tp_group(), get_pp_group()
    if tensor.world_size * pipeline.world_size != world_size:
        raise ValueError(
            "weights can be loaded in place with tensor and pipeline parallelism, not with context parallelism"
        )
    groups = [group.cpu_group for group in (tensor, pipeline) if group.world_size > 1]
    return EngineRanks(pipeline.rank_in_group * tensor.world_size + tensor.rank_in_group, world_size, groups)
