"""Opening the gate of a router: what it is told, and one that is not there, refuses, or has no token."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from connectors.engine_client import CommandOrder
from orchestrator.plan.types import RouterPlan
from orchestrator.supervisor.interfaces import GateFailed, ServingEpoch
from orchestrator.supervisor.router_gate import HttpGate

SERVING = ServingEpoch(
    epoch=1,
    version="initial",
    instances={"prefill-0": "a1", "decode-0": "b2"},
    order=CommandOrder(update=0, attempt=0, step=0),
)


def router(token_file: Path) -> RouterPlan:
    return RouterPlan(
        url="http://127.0.0.1:9", internal_url="http://127.0.0.1:9", config_file="", token_file=str(token_file)
    )


def test_a_missing_token_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(GateFailed, match=r"token cannot be read: .*no-token.*stop the job and start it again"):
        HttpGate().open(router(tmp_path / "no-token"), SERVING)


def test_a_token_that_is_no_text(tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_bytes(b"\xff\xfe")
    with pytest.raises(GateFailed, match="token cannot be read"):
        HttpGate().open(router(token), SERVING)


def test_a_router_that_does_not_answer(tmp_path: Path) -> None:
    """Nothing listens on port 9."""
    token = tmp_path / "token"
    token.write_text("t\n")
    with pytest.raises(GateFailed, match=r"POST http://127\.0\.0\.1:9/epochs: "):
        HttpGate().open(router(token), SERVING)


class FakeRouter:
    """Serves from the third look on, once its gate was opened."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.told: list[tuple[str, object]] = []
        self.refuses = ""
        self.url = ""

    def answer(self, path: str, body: bytes, token: str | None) -> int:
        self.asked.append(path)
        if path == "/ready":
            return 200 if self.asked.count("/ready") > 2 else 503
        assert token == "Bearer t"
        self.told.append((path, json.loads(body)))
        return 409 if path == self.refuses else 200


@pytest.fixture
def fake_router() -> Iterator[FakeRouter]:
    fake = FakeRouter()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self._answer(self.rfile.read(int(self.headers["content-length"])))

        def do_GET(self) -> None:
            self._answer(b"")

        def _answer(self, body: bytes) -> None:
            self.send_response(fake.answer(self.path, body, self.headers["authorization"]))
            self.send_header("content-length", "0")
            self.end_headers()

        def log_message(self, *_: object) -> None:
            return

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        fake.url = f"http://127.0.0.1:{server.server_port}"
        yield fake
        server.shutdown()


def open_gate(fake: FakeRouter, tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text("t\n")
    plan = RouterPlan(url=fake.url, internal_url=fake.url, config_file="", token_file=str(token))
    HttpGate().open(plan, SERVING)


def test_the_router_learns_the_epoch_before_its_gate_opens(tmp_path: Path, fake_router: FakeRouter) -> None:
    open_gate(fake_router, tmp_path)
    order = {"update": 0, "attempt": 0, "step": 0}
    replicas = [{"name": "prefill-0", "instance": "a1"}, {"name": "decode-0", "instance": "b2"}]
    assert fake_router.told == [
        ("/epochs", {"epoch": 1, "version": "initial", "replicas": replicas, **order}),
        ("/gate", {"gate": "open", **order}),
    ]


def test_the_gate_counts_as_open_once_the_router_serves(tmp_path: Path, fake_router: FakeRouter) -> None:
    open_gate(fake_router, tmp_path)
    assert fake_router.asked == ["/epochs", "/gate", "/ready", "/ready", "/ready"]


@pytest.mark.parametrize("path", ["/epochs", "/gate"])
def test_a_router_that_refuses(tmp_path: Path, fake_router: FakeRouter, path: str) -> None:
    fake_router.refuses = path
    with pytest.raises(GateFailed, match=f"{path} answered 409"):
        open_gate(fake_router, tmp_path)
    assert fake_router.asked[-1] == path
