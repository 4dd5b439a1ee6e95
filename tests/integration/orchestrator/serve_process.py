"""`headrace serve` as a process of its own, on a state folder of its own."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx

from tests.fakes.stub_job import free_ports

WAIT_S = 150
"""On a machine that does much else."""
LOOK_EVERY_S = 0.05


def until(what: str, condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < deadline, f"not within {WAIT_S} s: {what}"
        time.sleep(LOOK_EVERY_S)


class Serve:
    """One `headrace serve` after the other, on one state folder."""

    def __init__(self, home: Path) -> None:
        self.home = home
        (port,) = free_ports(1)
        self.command = [sys.executable, "-m", "orchestrator", "serve", "--port", str(port)]
        self.environment = {**os.environ, "HEADRACE_HOME": str(home), "HEADRACE_API_TOKEN": "secret"}
        headers = {"authorization": "Bearer secret"}
        self.client = httpx.Client(
            base_url=f"http://127.0.0.1:{port}", headers=headers, timeout=WAIT_S, trust_env=False
        )
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        with (self.home / "serve.log").open("ab") as log:
            self.process = subprocess.Popen(self.command, env=self.environment, stdout=log, stderr=log)
        until("it answers", self._answers)

    def end(self, sent: signal.Signals) -> int:
        assert self.process is not None
        self.process.send_signal(sent)
        return self.process.wait(WAIT_S)

    def kill(self) -> None:
        assert self.end(signal.SIGKILL) == -signal.SIGKILL

    def close(self) -> None:
        if self.process is not None and self.process.poll() is None:
            self.end(signal.SIGKILL)
        self.client.close()

    def get(self, path: str) -> dict[str, Any]:
        reply = self.client.get(path)
        assert reply.status_code == 200, reply.text
        found: dict[str, Any] = reply.json()
        return found

    def events(self, job: str, kind: str) -> list[dict[str, Any]]:
        return [event for event in self.get(f"/jobs/{job}/events?limit=1000")["events"] if event["kind"] == kind]

    def adopted(self, job: str) -> dict[str, Any]:
        """What the life that runs now said of the job."""
        assert self.process is not None
        pid = self.process.pid
        until("it adopts the job", lambda: any(each["data"]["pid"] == pid for each in self.events(job, "job_adopted")))
        return self.events(job, "job_adopted")[-1]

    def _answers(self) -> bool:
        assert self.process is not None
        assert self.process.poll() is None, (self.home / "serve.log").read_text()[-3000:]
        try:
            return self.client.get("/health").status_code == 200
        except httpx.TransportError:
            return False
