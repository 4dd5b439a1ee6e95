"""What a job still holds: its router, by its gauges, and its engines, by their metrics and their fences.

Once all clients have their replies or have left, it must come to nothing (`wait_for_nothing_held`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import httpx

from tests.e2e.harness import job_token, metric, wait_until

ROUTER_GAUGES = (
    "headrace_router_legs_in_flight",
    "headrace_router_tokens_in_flight",
    "headrace_router_requests_waiting",
    "headrace_router_requests_admitted",
)
ENGINE_GAUGES = ("vllm:num_requests_running", "vllm:num_requests_waiting")


def held(status: dict[str, Any]) -> list[str]:
    """Each thing that is held, in words."""
    found = _above_zero("router", f"{status['router']['url']}/metrics", ROUTER_GAUGES)
    token = job_token(status)
    for engine in status["engines"]:
        name, url = engine["name"], engine["url"]
        found += _above_zero(name, f"{url}/metrics", ENGINE_GAUGES, token)
        fence = httpx.get(f"{url}/fence", headers=token, timeout=30, trust_env=False).raise_for_status().json()
        found += [f"{name}: open request {each}" for each in fence["open_requests"]]
    return found


def _above_zero(owner: str, url: str, gauges: Sequence[str], headers: dict[str, str] | None = None) -> list[str]:
    values = {gauge: metric(url, gauge, headers) for gauge in gauges}
    return [f"{owner}: {gauge} {value:g}" for gauge, value in values.items() if value]


def wait_for_nothing_held(status: dict[str, Any]) -> None:
    """An abort takes a moment to reach an engine's core."""
    found: list[str] = []

    def nothing() -> bool:
        found[:] = held(status)
        return not found

    wait_until(lambda: f"nothing is held, now {found}", nothing)
