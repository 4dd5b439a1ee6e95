"""Moves the router's gate through its internal port."""

from __future__ import annotations

from pathlib import Path

import httpx

from orchestrator.plan.types import RouterPlan
from orchestrator.supervisor.interfaces import GateFailed

CALL_TIMEOUT_S = 10.0


class HttpGate:
    """The `Gate` of a running router."""

    def open(self, router: RouterPlan) -> None:
        self._set(router, "open")

    def _set(self, router: RouterPlan, state: str) -> None:
        try:
            token = Path(router.token_file).read_text(encoding="ascii").strip()
        except (OSError, ValueError) as error:
            raise GateFailed(f"the router's token cannot be read: {error}; stop the job and start it again") from error
        try:
            reply = httpx.post(
                f"{router.internal_url}/gate",
                json={"gate": state},
                headers={"authorization": f"Bearer {token}"},
                timeout=CALL_TIMEOUT_S,
                trust_env=False,
                verify=router.internal_url.startswith("https:"),
            )
        except httpx.HTTPError as error:
            raise GateFailed(f"POST {router.internal_url}/gate: {str(error) or type(error).__name__}") from error
        if reply.is_error:
            raise GateFailed(f"POST {router.internal_url}/gate answered {reply.status_code}: {reply.text[:200]}")
