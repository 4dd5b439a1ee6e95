"""Opening the gate of a router that is not there, or whose token is not."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
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


@pytest.fixture
def slow_router() -> Iterator[tuple[str, list[str]]]:
    """A router whose gate opens at once and that serves from the third look on; and what it was asked."""
    asked: list[str] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["content-length"]))
            self._answer(200)

        def do_GET(self) -> None:
            self._answer(200 if asked.count("/ready") >= 2 else 503)

        def _answer(self, status: int) -> None:
            asked.append(self.path)
            self.send_response(status)
            self.send_header("content-length", "0")
            self.end_headers()

        def log_message(self, *_: object) -> None:
            return

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}", asked
        server.shutdown()


def test_the_gate_counts_as_open_once_the_router_serves(tmp_path: Path, slow_router: tuple[str, list[str]]) -> None:
    url, asked = slow_router
    token = tmp_path / "token"
    token.write_text("t\n")
    HttpGate().open(RouterPlan(url=url, internal_url=url, config_file="", token_file=str(token)))
    assert asked == ["/gate", "/ready", "/ready", "/ready"]
