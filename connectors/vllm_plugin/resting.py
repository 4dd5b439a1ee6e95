"""What waits in an engine leaves its core to what computes: for engines that compute on cores themselves.

- NIXL's progress thread polls on without pause: its Python API sets `pthrDelay` to 0 microseconds. With a delay it
  sleeps until UCX wakes it or the delay is over. Seen with NIXL 1.5.1 on loopback TCP, 0 against 10,000: an idle one's
  CPU time falls from 98 % of a core to 0.3 %, and a read of 64 KiB takes the same 0.2 ms.
- vLLM's engine core and its workers wait for each other's messages with `sched_yield`, for a second before they sleep
  (`SpinCondition`). Between two steps that is always, and while a handoff has not been read there is always a next
  step: two cores per engine. Here they sleep at once, until they are notified or the time is over.

vLLM and NIXL have no setting for either, so classes of theirs are replaced when the plug-in is loaded, which is before
the first agent and the first queue. Where they look different, things stay as they are: that costs cores and no more.
"""

from __future__ import annotations

import importlib
import logging
from typing import Any

REST_VARIABLE = "HEADRACE_REST_US"
"""Environment variable: for how many microseconds what waits may sleep. Without it everything polls as it does."""

_AGENTS = "nixl._api"
_QUEUES = "vllm.distributed.device_communicators.shm_broadcast"

_log = logging.getLogger(__name__)


def rest_while_waiting(rest_us: str) -> None:
    """Of all that this process waits with from now on. May be called more than once.

    Raises:
        ValueError: no whole number above 0.
    """
    if not rest_us.isascii() or not rest_us.isdecimal() or not int(rest_us):
        raise ValueError(f"{REST_VARIABLE} must be a whole number of microseconds above 0, not {rest_us!r}")
    _replace(_AGENTS, ("nixlBind", "nixlAgent"), _resting_agent, int(rest_us))
    _replace(_QUEUES, ("SpinCondition",), _resting_condition, int(rest_us))


def _replace(module: str, path: tuple[str, ...], make: Any, rest_us: int) -> None:
    """Put a subclass in a class's place."""
    try:
        # Imported late: the planner reads this module's variable where no engine is installed.
        holder: Any = importlib.import_module(module)
        for name in path[:-1]:
            holder = getattr(holder, name)
        found = getattr(holder, path[-1])
        if found.__module__ != __name__:
            setattr(holder, path[-1], make(holder, found, rest_us))
    except (ImportError, AttributeError) as error:
        _log.warning("%s polls without pause, on a core of its own: %s", module, error)


def _resting_agent(bindings: Any, agent: Any, rest_us: int) -> Any:
    if "pthrDelay" not in vars(bindings.nixlAgentConfig):
        raise AttributeError("its agents have no pthrDelay")

    class RestingAgent(agent):  # type: ignore[misc]  # known at run time alone
        def __init__(self, name: str, config: Any) -> None:
            config.pthrDelay = rest_us
            super().__init__(name, config)

    return RestingAgent


def _resting_condition(_module: Any, condition: Any, rest_us: int) -> Any:
    if "busy_loop_s" not in condition.__init__.__annotations__:
        raise AttributeError("its queues have no busy_loop_s")
    longest_ms = -(-rest_us // 1000)

    class RestingCondition(condition):  # type: ignore[misc]  # known at run time alone
        def __init__(self, *given: Any, **named: Any) -> None:
            super().__init__(*given, **{**named, "busy_loop_s": 0})

        def wait(self, timeout_ms: float | None = None) -> None:
            # vLLM drops notifications that follow each other closely: no wait may count on one. Its caller looks again.
            super().wait(longest_ms if timeout_ms is None else min(timeout_ms, longest_ms))

    return RestingCondition
