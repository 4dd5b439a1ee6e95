"""`headrace serve` as a process of its own: it supervises the job, restarts its engines and drives its updates."""

from __future__ import annotations

import subprocess
from pathlib import Path
from types import TracebackType
from typing import Any

import httpx

from tests.e2e.harness import CALL_TIMEOUT_S, UP_TIMEOUT_S, Headrace, wait_until
from tests.stack.weights.checkpoints import path_source
from tests.stale.schedule import InFlight, Strategy

PORT = 9459
TOKEN = "a-token-of-this-check"
STOP_S = 30


class UpdateFailed(Exception):
    """The job does not serve the version; the text says how its update ended."""


class ControlPlane:
    """Of one state folder, for one job."""

    def __init__(self, headrace: Headrace, job: str) -> None:
        self._headrace = headrace
        self._job = f"/jobs/{job}"
        self._http = httpx.Client(
            base_url=f"http://127.0.0.1:{PORT}",
            headers={"authorization": f"Bearer {TOKEN}"},
            timeout=CALL_TIMEOUT_S,
            trust_env=False,
        )

    def __enter__(self) -> ControlPlane:
        command = self._headrace.command("serve", "--port", str(PORT))
        environment = {**self._headrace.environment, "HEADRACE_API_TOKEN": TOKEN}
        self._headrace.home.mkdir(parents=True, exist_ok=True)
        with (self._headrace.home / "serve.log").open("ab") as log:
            self._process = subprocess.Popen(command, env=environment, stdout=log, stderr=log)
        wait_until("the control plane answers", self._answers)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._process.terminate()
        self._process.wait(STOP_S)
        self._http.close()

    def start(self, table: dict[str, Any]) -> dict[str, Any]:
        """Start the job; its status once it serves."""
        reply = self._http.post("/jobs", json=table)
        assert reply.status_code == 202, reply.text
        wait_until(lambda: f"it serves: {self.status()}", lambda: self.status()["phase"] != "starting", UP_TIMEOUT_S)
        status = self.status()
        assert status["phase"] == "ready", status["reason"]
        return status

    def status(self) -> dict[str, Any]:
        """With every process as it is now."""
        return self._get("")

    def served_epoch(self) -> int:
        return int(self._get("/weights")["served"]["epoch"])

    def push(self, version: str, checkpoint: Path, strategy: Strategy, in_flight: InFlight) -> None:
        """Returns when the job serves this version. Blocking.

        Raises:
            UpdateFailed
        """
        body = {"source": path_source(checkpoint, version), "strategy": strategy, "in_flight": in_flight}
        reply = self._http.post(f"{self._job}/weights", json=body)
        if reply.status_code == 409:
            raise UpdateFailed(f"refused: {reply.json()['error']['message']}")
        number = reply.raise_for_status().json()["number"]
        update: dict[str, Any] = {}

        def has_ended() -> bool:
            update.update(self._get(f"/weights/updates/{number}"))
            return update["outcome"] is not None

        wait_until(lambda: f"update {number} ends: {self._get('/weights')}", has_ended, UP_TIMEOUT_S)
        if update["outcome"] != "committed":
            raise UpdateFailed(f"{update['outcome']}: {update['why']}")

    def _get(self, path: str) -> dict[str, Any]:
        found: dict[str, Any] = self._http.get(f"{self._job}{path}").raise_for_status().json()
        return found

    def _answers(self) -> bool:
        try:
            return self._http.get("/health").is_success
        except httpx.HTTPError:
            return False
