"""Asks a router what only it can tell: whether it serves, and whom."""

from __future__ import annotations

import httpx

from orchestrator.plan.types import RouterPlan
from orchestrator.weights.router_client import RouterCallFailed, RouterClient, RouterTraffic

CALL_TIMEOUT_S = 10.0


def not_ready(router: RouterPlan) -> str | None:
    """Why it does not serve yet; None once it does."""
    try:
        reply = httpx.get(f"{router.url}/ready", timeout=CALL_TIMEOUT_S, trust_env=False)
    except httpx.HTTPError as error:
        return f"GET {router.url}/ready: {str(error) or type(error).__name__}"
    return None if reply.is_success else f"GET {router.url}/ready answered {reply.status_code}: {reply.text[:200]}"


def router_traffic(router: RouterPlan) -> RouterTraffic | str:
    """What passes through it, or why that is not known."""
    try:
        with RouterClient(router) as client:
            return client.traffic()
    except RouterCallFailed as error:
        return str(error)
