"""Removals from a pool whose master says more than is so."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from connectors.pool_client import PoolCallFailed, PoolClient

JOB = "job-1.a"


@contextmanager
def master_with(counts: list[int], status: int = 200) -> Iterator[str]:
    """A master's address for questions; so many keys of the job's epoch 1 are left each time that it is asked, the last
    count for good."""

    class Answers(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            left = counts.pop(0) if len(counts) > 1 else counts[0]
            body = "".join(f"{JOB}.1@model@{number}\n" for number in range(left)).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            """Quiet."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Answers) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}/metrics"
        finally:
            server.shutdown()
            thread.join()


@pytest.fixture
def interpreter(tmp_path: Path) -> Path:
    """Whatever it is asked to remove, one key is gone."""
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\necho '{\"removed\": 1}'\n")
    python.chmod(0o755)
    return python


def client(interpreter: Path, metrics_url: str) -> PoolClient:
    return PoolClient(python=str(interpreter), master_address="127.0.0.1:1", metrics_url=metrics_url)


def test_a25_a_removal_is_asked_for_until_nothing_is_left(interpreter: Path) -> None:
    counts = [2, 1, 0]
    with master_with(counts) as metrics_url:
        assert client(interpreter, metrics_url).purge_epoch(JOB, 1, 30) == 3
    assert counts == [0]


def test_a25_what_is_left_in_the_end_is_counted_in_the_error(interpreter: Path) -> None:
    with master_with([2]) as metrics_url, pytest.raises(PoolCallFailed, match=r"2 keys job-1\.a\.1@\.\.\. are still"):
        client(interpreter, metrics_url).purge_epoch(JOB, 1, 5)


def test_a25_a_master_without_the_route_is_not_believed(interpreter: Path) -> None:
    with master_with([0], status=404) as metrics_url, pytest.raises(PoolCallFailed, match="404"):
        client(interpreter, metrics_url).wipe(30)
