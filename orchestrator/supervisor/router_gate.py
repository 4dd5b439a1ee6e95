"""Tells the router through its internal port what the engines serve under, opens its gate, and waits until the router
itself says that it serves."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path

import httpx

from orchestrator.plan.types import RouterPlan
from orchestrator.supervisor.interfaces import GateFailed, ServingEpoch

CALL_TIMEOUT_S = 10.0
READY_WITHIN_S = 120.0
"""A router believes no engine before it has probed it itself; a first probe of a busy engine can take seconds."""
LOOK_EVERY_S = 0.2


class HttpGate:
    """The `Gate` of a running router."""

    def open(self, router: RouterPlan, serving: ServingEpoch) -> None:
        order = asdict(serving.order)
        replicas = [{"name": name, "instance": instance} for name, instance in serving.instances.items()]
        epoch = {"epoch": serving.epoch, "version": serving.version, "replicas": replicas, **order}
        self._post(router, "/epochs", epoch)
        self._post(router, "/gate", {"gate": "open", **order})
        self._wait_ready(router.url)

    def _wait_ready(self, url: str) -> None:
        deadline = time.monotonic() + READY_WITHIN_S
        while (reason := _not_ready(url)) is not None:
            if time.monotonic() > deadline:
                raise GateFailed(f"GET {url}/ready within {READY_WITHIN_S:.0f} s: {reason}")
            time.sleep(LOOK_EVERY_S)

    def _post(self, router: RouterPlan, path: str, body: Mapping[str, object]) -> None:
        try:
            token = Path(router.token_file).read_text(encoding="ascii").strip()
        except (OSError, ValueError) as error:
            raise GateFailed(f"the router's token cannot be read: {error}; stop the job and start it again") from error
        url = f"{router.internal_url}{path}"
        try:
            reply = httpx.post(
                url,
                json=body,
                headers={"authorization": f"Bearer {token}"},
                timeout=CALL_TIMEOUT_S,
                trust_env=False,
                verify=router.internal_url.startswith("https:"),
            )
        except httpx.HTTPError as error:
            raise GateFailed(f"POST {url}: {str(error) or type(error).__name__}") from error
        if reply.is_error:
            raise GateFailed(f"POST {url} answered {reply.status_code}: {reply.text[:200]}")


def _not_ready(url: str) -> str | None:
    """Why the router does not serve yet; None once it does."""
    try:
        reply = httpx.get(f"{url}/ready", timeout=CALL_TIMEOUT_S, trust_env=False)
    except httpx.HTTPError as error:
        return str(error) or type(error).__name__
    return None if reply.is_success else f"answered {reply.status_code}: {reply.text[:200]}"
