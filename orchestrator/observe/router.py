"""Asks a router what only it can tell: whether it serves."""

from __future__ import annotations

import httpx

from orchestrator.plan.types import RouterPlan

CALL_TIMEOUT_S = 10.0


def not_ready(router: RouterPlan) -> str | None:
    """Why it does not serve yet; None once it does."""
    try:
        reply = httpx.get(f"{router.url}/ready", timeout=CALL_TIMEOUT_S, trust_env=False)
    except httpx.HTTPError as error:
        return f"GET {router.url}/ready: {str(error) or type(error).__name__}"
    return None if reply.is_success else f"GET {router.url}/ready answered {reply.status_code}: {reply.text[:200]}"
