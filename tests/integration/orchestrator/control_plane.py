"""Starts the stub control plane as a process of its own, with a token, on a free port."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx

ROOT = Path(__file__).parents[3]
START_LIMIT_S = 30


@dataclass(frozen=True, kw_only=True)
class RunningControlPlane:
    url: str
    home: Path
    token: str
    log: Path
    """All that it writes to its terminal."""

    @property
    def headers(self) -> dict[str, str]:
        return {"authorization": f"Bearer {self.token}"}

    def client(self) -> httpx.Client:
        return httpx.Client(base_url=self.url, headers=self.headers, timeout=30, trust_env=False)


@contextmanager
def running_control_plane(folder: Path, environment: Mapping[str, str]) -> Iterator[RunningControlPlane]:
    """With nothing left of its jobs at the end."""
    home, log = folder / "home", folder / "serve.log"
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "tests.fakes.stub_control_plane", str(home), str(port)]
    with log.open("wb") as output:
        server = subprocess.Popen(
            command, cwd=ROOT, env={**os.environ, **environment}, stdout=output, stderr=subprocess.STDOUT
        )
    running = RunningControlPlane(
        url=f"http://127.0.0.1:{port}", home=home, token=environment["HEADRACE_API_TOKEN"], log=log
    )
    try:
        with running.client() as client:
            _wait_until_it_answers(client, running)
            yield running
            for job in client.get("/jobs").json()["jobs"]:
                assert client.delete(f"/jobs/{job['name']}").status_code == 200
    finally:
        server.terminate()
        server.wait(30)


def _wait_until_it_answers(client: httpx.Client, running: RunningControlPlane) -> None:
    deadline = time.monotonic() + START_LIMIT_S
    while True:
        try:
            client.get("/health").raise_for_status()
            return
        except httpx.HTTPError:
            assert time.monotonic() < deadline, running.log.read_text()
            time.sleep(0.1)
