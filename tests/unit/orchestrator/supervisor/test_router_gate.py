"""Opening the gate of a router that is not there, or whose token is not."""

from __future__ import annotations

from pathlib import Path

import pytest

from orchestrator.plan.types import RouterPlan
from orchestrator.supervisor.interfaces import GateFailed
from orchestrator.supervisor.router_gate import HttpGate


def router(token_file: Path) -> RouterPlan:
    return RouterPlan(
        url="http://127.0.0.1:9", internal_url="http://127.0.0.1:9", config_file="", token_file=str(token_file)
    )


def test_a_missing_token_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(GateFailed, match=r"token cannot be read: .*no-token.*stop the job and start it again"):
        HttpGate().open(router(tmp_path / "no-token"))


def test_a_token_that_is_no_text(tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_bytes(b"\xff\xfe")
    with pytest.raises(GateFailed, match="token cannot be read"):
        HttpGate().open(router(token))


def test_a_router_that_does_not_answer(tmp_path: Path) -> None:
    """Nothing listens on port 9."""
    token = tmp_path / "token"
    token.write_text("t\n")
    with pytest.raises(GateFailed, match=r"POST http://127\.0\.0\.1:9/gate: "):
        HttpGate().open(router(token))
