"""`headrace serve` as a process of its own, for one job: it supervises the job, restarts its engines and drives its
updates. It can be killed and started again."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

import httpx

from tests.e2e.harness import CALL_TIMEOUT_S, UP_TIMEOUT_S, Headrace, wait_until
from tests.fleet.expected import weight_sets
from tests.fleet.versions import WEIGHTS, version_name, weights_of

PORT = 9438
TOKEN = "a-token-of-this-test"
STOP_S = 30


class UpdateFailed(Exception):
    """The job does not serve the version; the text says how its update ended."""


@dataclass(frozen=True, kw_only=True)
class Push:
    number: int
    version: str
    weights: int


@dataclass
class Control:
    headrace: Headrace
    job: str
    _process: subprocess.Popen[bytes] | None = None
    _pushes: Iterator[int] = field(default_factory=lambda: count(1))
    _http: httpx.Client = field(
        default_factory=lambda: httpx.Client(
            base_url=f"http://127.0.0.1:{PORT}",
            headers={"authorization": f"Bearer {TOKEN}"},
            timeout=CALL_TIMEOUT_S,
            trust_env=False,
        )
    )

    def start(self) -> None:
        environment = {**self.headrace.environment, "HEADRACE_API_TOKEN": TOKEN}
        self.headrace.home.mkdir(parents=True, exist_ok=True)
        with (self.headrace.home / "serve.log").open("ab") as output:
            command = self.headrace.command("serve", "--port", str(PORT))
            self._process = subprocess.Popen(command, env=environment, stdout=output, stderr=output)
        wait_until("the control API answers", self._answers)

    def kill(self) -> None:
        assert self._process is not None
        self._process.kill()
        self._process.wait()

    def stop(self) -> None:
        assert self._process is not None
        self._process.terminate()
        self._process.wait(STOP_S)
        self._http.close()

    @contextmanager
    def running_job(self, table: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """The job's status once it serves."""
        reply = self._http.post("/jobs", json=table)
        assert reply.status_code == 202, reply.text
        try:
            wait_until(
                lambda: f"it serves: {self.status()}", lambda: self.status()["phase"] != "starting", UP_TIMEOUT_S
            )
            status = self.status()
            assert status["phase"] == "ready", status["reason"]
            yield status
        finally:
            self.headrace.down(self.job)

    def status(self) -> dict[str, Any]:
        """With every process as it is now."""
        found: dict[str, Any] = self.get("")
        return found

    def served(self) -> tuple[str, int]:
        """Version and epoch."""
        served = self.get("/weights")["served"]
        return str(served["version"]), int(served["epoch"])

    def push(self, weights: int | None = None, checkpoint: Path | None = None, **options: str) -> Push:
        """Ask for a set of weights under a new name: the one after what is served, unless told. `checkpoint`: where it
        is to be had, if not where the set is.

        Raises:
            UpdateFailed: it is refused.
        """
        if weights is None:
            weights = (weights_of(self.served()[0]) + 1) % WEIGHTS
        path = str(checkpoint or weight_sets()[weights])
        return self.push_source({"transport": "path", "version": self.new_version(weights), "path": path}, **options)

    def new_version(self, weights: int) -> str:
        return version_name(weights, next(self._pushes))

    def push_source(self, source: Mapping[str, Any], **options: str) -> Push:
        """As `push`, of a version that has its name already."""
        reply = self._http.post(f"/jobs/{self.job}/weights", json={"source": source, **options})
        if reply.status_code == 409:
            raise UpdateFailed(f"refused: {reply.json()['detail']}")
        version = str(source["version"])
        return Push(number=reply.raise_for_status().json()["number"], version=version, weights=weights_of(version))

    def outcome(self, push: Push) -> tuple[str, str]:
        """How it ended, and why so. Blocking."""
        update: dict[str, Any] = {}

        def has_ended() -> bool:
            update.update(self.get(f"/weights/updates/{push.number}"))
            return update["outcome"] is not None

        wait_until(lambda: f"update {push.number} ends: {self.get('/weights')}", has_ended, UP_TIMEOUT_S)
        return update["outcome"], update["why"]

    def wait_committed(self, push: Push) -> None:
        """Returns when the job serves it.

        Raises:
            UpdateFailed
        """
        outcome, why = self.outcome(push)
        if outcome != "committed":
            raise UpdateFailed(f"{outcome}: {why}")

    def update(self, weights: int | None = None, checkpoint: Path | None = None, **options: str) -> Push:
        """`push`, and `wait_committed`."""
        pushed = self.push(weights, checkpoint, **options)
        self.wait_committed(pushed)
        return pushed

    def request(self, path: str, body: Mapping[str, Any] | None = None) -> str:
        """`ask`, and `ended`."""
        return self.ended(self.ask(path, body))

    def ask(self, path: str, body: Mapping[str, Any] | None = None) -> int:
        """For a restart, a drain, or another number of replicas; the request's number."""
        reply = self._http.post(f"/jobs/{self.job}{path}", json=body)
        return int(reply.raise_for_status().json()["number"])

    def ended(self, number: int) -> str:
        """How a request ended, and why so. Blocking."""
        found: dict[str, Any] = {}

        def has_ended() -> bool:
            found.update(self.get(f"/requests/{number}"))
            return found["outcome"] is not None

        wait_until(lambda: f"request {number} ends: {found}", has_ended, UP_TIMEOUT_S)
        return f"{found['outcome']}{found['note']}"

    def get(self, path: str) -> Any:
        """Of the job."""
        return self._http.get(f"/jobs/{self.job}{path}").raise_for_status().json()

    def _answers(self) -> bool:
        try:
            return self._http.get("/health").is_success
        except httpx.HTTPError:
            return False


@contextmanager
def control_plane(headrace: Headrace, job: str) -> Iterator[Control]:
    control = Control(headrace, job)
    control.start()
    try:
        yield control
    finally:
        control.stop()
