"""Asks a router what only it can tell: whether it serves, and whom; whether clients still wait for something."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

import httpx

from orchestrator.plan.types import RouterPlan
from orchestrator.weights.router_client import RouterCallFailed, RouterClient, RouterRefused, RouterTraffic

CALL_TIMEOUT_S = 10.0
DRAIN_LOOK_S = 2.0
"""After so long a drain is asked whether it is still wanted."""
AGAIN_S = 0.2

_log = logging.getLogger(__name__)


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


def let_requests_end(router: RouterPlan, is_wanted: Callable[[], bool]) -> None:
    """As `supervisor/interfaces.py` has it. The gate is held: new requests wait in line, and get a 503 when the router
    ends. Whoever supervised the job may just be leaving, so each try follows what the router was told last."""
    try:
        with RouterClient(router) as client:
            while is_wanted():
                order = client.newest_order()
                try:
                    client.set_gate("holding", order, DRAIN_LOOK_S)
                    client.handle_in_flight("wait", order, DRAIN_LOOK_S)
                    return
                except RouterRefused as refused:
                    _log.info("%s: %s", router.url, refused)
                    time.sleep(AGAIN_S)
    except RouterCallFailed as error:
        _log.warning("%s: open requests are not waited for: %s", router.url, error)
