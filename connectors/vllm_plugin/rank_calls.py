"""Calls from an engine's API server to all its ranks, and what can be believed of their answers.

`weight_routes.py` sends commands about weights, `pool_epoch.py` moves the pool; `weights/extension.py` is the other
end. vLLM's engine client is reached through the app that the fence wraps. Standard library only.
"""

from __future__ import annotations

import secrets
from typing import Any

from connectors.vllm_plugin.weights.settings import WORKER_EXTENSION
from connectors.vllm_plugin.weights.verdict import EngineVerdict, judge, lost_verdict


def call_name() -> str:
    """Of one call; its reports repeat it."""
    return secrets.token_hex(8)


def rank_count(client: Any) -> int:
    return int(client.vllm_config.parallel_config.world_size)


def has_extension(client: Any) -> bool:
    """Whether the ranks know our calls."""
    return bool(client.vllm_config.parallel_config.worker_extension_cls == WORKER_EXTENSION)


async def ask_ranks(client: Any, method: str, call: str, args: tuple[Any, ...], limit_s: float) -> EngineVerdict:
    """The verdict of all ranks on a call of that name; a lost one where no answers came."""
    try:
        answers = await client.collective_rpc(method, timeout=limit_s, args=args)
    except Exception as error:
        return lost_verdict(f"the ranks did not answer: {type(error).__name__}: {error}")
    return judge(call, answers, rank_count(client))
