"""In which epoch an engine's ranks use the pool: moved from the API server, on all ranks or not believed.

The fence moves it when an epoch is confirmed or withdrawn, `weight_routes.py` takes it out of its epoch before weights
change; `epoch_store.py` is what is moved. Standard library only.
"""

from __future__ import annotations

from typing import Any

from connectors.vllm_plugin.fence_rules import FenceState
from connectors.vllm_plugin.rank_calls import ask_ranks, call_name, has_extension

MOVE_S = 120.0
"""Ranks answer between two steps of the engine; past this one of them is stuck."""


class PoolEpoch:
    """Of one engine. Its ranks start outside of every epoch."""

    def __init__(self, state: FenceState) -> None:
        self._state = state
        self._asked: tuple[int | None] | None = (None,)
        """The epoch that all ranks are in, or on their way to; None where they may differ."""

    async def move(self, client: Any, epoch: int | None) -> str:
        """Why the ranks are not all there; empty where they are. Later moves reach the ranks later."""
        if not has_extension(client) or self._asked == (epoch,):
            return ""
        self._asked = (epoch,)
        call = call_name()
        verdict = await ask_ranks(client, "headrace_pool", call, (call, epoch), MOVE_S)
        self._state.lost = self._state.lost or verdict.lost
        if not verdict.ok:
            self._asked = None
        return verdict.error
