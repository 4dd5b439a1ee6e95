"""Weight updates of a real job: its control plane, its job, its clients, and what their replies must be.

The second checkpoint is the model with other random weights. That it is served shows in log-probabilities; the first
one, pushed again under another name, gives back those of the start.
"""

from __future__ import annotations

import subprocess
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any

import httpx

from tests.e2e.harness import (
    CALL_TIMEOUT_S,
    PATIENT_HANDOFF,
    UP_TIMEOUT_S,
    Headrace,
    router_state,
    split_job,
    wait_until,
)
from tests.fakes.tiny_model import make_tiny_model

NAME = "updated"
ROUTER_PORT = 9436
CONTROL_PORT = 9438
TOKEN = "a-token-of-this-test"
UPDATE_S = 240
PROMPTS = [[(7 * row + 3 * column + row * column) % 250 for column in range(40)] for row in range(4)]
NEW_TOKENS = 8
SAME, OTHER = 1e-4, 1e-2
"""Log-probabilities of the same weights differ by less, those of other weights by more."""


@dataclass
class Control:
    """`headrace serve`, which can be killed and started again."""

    headrace: Headrace
    process: subprocess.Popen[bytes] | None = None
    client: httpx.Client = field(
        default_factory=lambda: httpx.Client(
            base_url=f"http://127.0.0.1:{CONTROL_PORT}",
            headers={"authorization": f"Bearer {TOKEN}"},
            timeout=60,
            trust_env=False,
        )
    )

    def start(self) -> None:
        environment = {**self.headrace.environment, "HEADRACE_API_TOKEN": TOKEN}
        with (self.headrace.home / "serve.log").open("ab") as output:
            command = self.headrace.command("serve", "--port", str(CONTROL_PORT))
            self.process = subprocess.Popen(command, env=environment, stdout=output, stderr=output)
        wait_until("the control API answers", self.answers)

    def answers(self) -> bool:
        try:
            return self.client.get("/health").status_code == 200
        except httpx.HTTPError:
            return False

    def kill(self) -> None:
        assert self.process is not None
        self.process.kill()
        self.process.wait()

    def get(self, path: str) -> Any:
        return self.client.get(f"/jobs/{NAME}{path}").raise_for_status().json()

    def push(self, version: str, checkpoint: Path, **options: str) -> int:
        return self.push_source({"transport": "path", "version": version, "path": str(checkpoint)}, **options)

    def push_source(self, source: Mapping[str, Any], **options: str) -> int:
        reply = self.client.post(f"/jobs/{NAME}/weights", json={"source": source, **options})
        assert reply.status_code == 202, reply.text
        return int(reply.json()["number"])

    def outcome(self, number: int) -> tuple[str | None, str]:
        update = self.get(f"/weights/updates/{number}")
        return update["outcome"], update["why"]

    def wait_committed(self, number: int) -> None:
        def words() -> str:
            return f"update {number} ends: {self.get('/weights')}"

        wait_until(words, lambda: self.outcome(number)[0] is not None, timeout_s=UPDATE_S)
        assert self.outcome(number) == ("committed", "")


@contextmanager
def control_plane(headrace: Headrace) -> Iterator[Control]:
    control = Control(headrace)
    with control.client:
        control.start()
        try:
            yield control
        finally:
            control.kill()


def two_checkpoints(tiny_model: Path) -> tuple[Path, Path]:
    """The model that the job starts with, and one with other weights."""
    return tiny_model, make_tiny_model(tiny_model.with_name("weights-qwen3-1"), 1, "qwen3")


@contextmanager
def updated_job(control: Control, model: Path, pairs: int) -> Iterator[dict[str, Any]]:
    """A job of so many prefill and as many decode engines, started by the control API."""
    offload = {"type": "mooncake", "cpu": {"num_bytes": 64 << 20}}
    roles = {"prefill": {"replicas": pairs}, "decode": {"replicas": pairs, "kv_offload": {"cpu": {"num_bytes": 0}}}}
    table = split_job(
        NAME,
        model,
        ROUTER_PORT,
        kv_offload=offload,
        roles=roles,
        monitoring={"enabled": False},
        handoff=PATIENT_HANDOFF,
        weights={"transport": "nixl", "limits": {"grace": 2, "command": 60}},
        audit={"share": 1},
    )
    table["engine"] |= {"max_model_len": 256, "kv_cache_memory_bytes": 32 << 20}
    assert control.client.post("/jobs", json=table).status_code == 202
    try:
        wait_until(
            lambda: f"the job serves: {control.get('')}",
            lambda: control.get("")["phase"] not in ("starting",),
            timeout_s=UP_TIMEOUT_S,
        )
        status = control.get("")
        assert status["phase"] in ("ready", "degraded"), status["reason"]
        yield status
    finally:
        control.headrace.down(NAME)


@dataclass
class Reply:
    status: int
    body: Any
    logprobs: list[float]

    @property
    def label(self) -> Any:
        return self.body["headrace"]


def complete(job: dict[str, Any], prompt: list[int], session: str) -> Reply:
    body = {
        "model": "tiny",
        "prompt": prompt,
        "max_tokens": NEW_TOKENS,
        "temperature": 0,
        "ignore_eos": True,
        "logprobs": 1,
        "return_headrace": True,
    }
    url = f"{job['router']['url']}/v1/completions"
    reply = httpx.post(url, json=body, headers={"x-session-id": session}, timeout=CALL_TIMEOUT_S, trust_env=False)
    found = reply.json()
    logprobs = found["choices"][0]["logprobs"]["token_logprobs"] if reply.status_code == 200 else []
    return Reply(status=reply.status_code, body=found, logprobs=logprobs)


def logprobs(job: dict[str, Any]) -> list[list[float]]:
    return [complete(job, prompt, f"probe-{number}").logprobs for number, prompt in enumerate(PROMPTS)]


def difference(left: list[list[float]], right: list[list[float]]) -> float:
    pairs = zip(chain.from_iterable(left), chain.from_iterable(right), strict=True)
    return max(abs(one - other) for one, other in pairs)


@contextmanager
def traffic(job: dict[str, Any], clients: int = 2) -> Iterator[list[Reply]]:
    """Requests run until the end of the block."""
    replies: list[Reply] = []
    over = threading.Event()

    def work(client: int) -> None:
        turn = 0
        while not over.is_set():
            prompt = [(client * 31 + turn * 7 + column) % 250 for column in range(40)]
            replies.append(complete(job, prompt, f"client-{client}-{turn // 3}"))
            turn += 1

    threads = [threading.Thread(target=work, args=(number,)) for number in range(clients)]
    for thread in threads:
        thread.start()
    try:
        wait_until("requests run before the update", lambda: len(replies) >= clients)
        yield replies
        count = len(replies)
        wait_until("requests run after the update", lambda: len(replies) >= count + 2 * clients)
    finally:
        over.set()
        for thread in threads:
            thread.join()


def check(replies: list[Reply], epochs: set[int]) -> None:
    """All answered, each of them by one version, and of these epochs."""
    assert {reply.status for reply in replies} == {200}, [reply.body for reply in replies if reply.status != 200][:3]
    assert {reply.label["single_version"] for reply in replies} == {True}
    assert {epoch for reply in replies for epoch in reply.label["epochs"]} == epochs


def serves(job: dict[str, Any], control: Control, version: str) -> int:
    """The epoch in which all engines serve this version."""
    served = control.get("/weights")["served"]
    assert served["version"] == version
    epoch = int(served["epoch"])
    assert {replica["epoch"] for replica in router_state(job)["replicas"]} == {epoch}
    return epoch
