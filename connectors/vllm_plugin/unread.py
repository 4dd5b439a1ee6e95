"""A pause that does not wait for handoffs which nobody is going to read: `handoffs.py` on all ranks, until it is over.

The fence passes such pauses through here. Standard library only.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Any

from connectors.vllm_plugin.rank_calls import ask_ranks, call_name, has_extension

DROP_EVERY_S = 0.1
"""The engine tells its ranks of a handoff a step after it has given it away: the last ones are not known at once."""
RANKS_ANSWER_S = 30.0

_log = logging.getLogger("vllm.headrace.unread")


async def drop_while(client: Any, pause: Awaitable[None], *, is_wanted: Callable[[], bool]) -> None:
    """Carry the pause out. Where ranks cannot drop handoffs it waits for their leases, as it does without this.
    `is_wanted`: nobody has asked for a resume since."""
    paused = asyncio.ensure_future(pause)
    try:
        while has_extension(client) and not (await asyncio.wait({paused}, timeout=DROP_EVERY_S))[0]:
            if not is_wanted():
                break
            call = call_name()
            verdict = await ask_ranks(client, "headrace_drop_handoffs", call, (call,), RANKS_ANSWER_S)
            if not verdict.ok:
                _log.warning("handoffs that nobody reads keep their leases: %s", verdict.error)
                break
        await paused
    finally:
        paused.cancel()
