"""New weights for a real fleet of two prefill and two decode engines, while requests run: barrier, rolling, and a
control plane that is killed in the middle.

The second checkpoint is the model with other random weights. That it is served shows in log-probabilities; the first
one, pushed again under another name, gives back those of the start.
"""

from __future__ import annotations

import os
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any

import httpx
import pytest

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

pytestmark = [pytest.mark.stack, pytest.mark.timeout(900)]

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
        source = {"transport": "path", "path": str(checkpoint)}
        reply = self.client.post(f"/jobs/{NAME}/weights", json={"version": version, "source": source, **options})
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


@pytest.fixture(scope="module")
def control(headrace: Headrace) -> Iterator[Control]:
    control = Control(headrace)
    control.start()
    yield control
    control.kill()


@pytest.fixture(scope="module")
def checkpoints(tiny_model: Path) -> tuple[Path, Path]:
    """The model that the job starts with, and one with other weights."""
    return tiny_model, make_tiny_model(tiny_model.with_name("weights-qwen3-1"), 1, "qwen3")


@pytest.fixture(scope="module")
def job(control: Control, checkpoints: tuple[Path, Path]) -> Iterator[dict[str, Any]]:
    offload = {"type": "mooncake", "cpu": {"num_bytes": 64 << 20}}
    roles = {"prefill": {"replicas": 2}, "decode": {"replicas": 2, "kv_offload": {"cpu": {"num_bytes": 0}}}}
    table = split_job(
        NAME,
        checkpoints[0],
        ROUTER_PORT,
        kv_offload=offload,
        roles=roles,
        monitoring={"enabled": False},
        handoff=PATIENT_HANDOFF,
        weights={"limits": {"grace": 2, "command": 60}},
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


@pytest.fixture(scope="module")
def first(job: dict[str, Any]) -> list[list[float]]:
    """Of the weights that the job started with."""
    return logprobs(job)


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


def test_a_barrier_while_requests_run(
    job: dict[str, Any], control: Control, checkpoints: tuple[Path, Path], first: list[list[float]]
) -> None:
    assert serves(job, control, "initial") == 1
    with traffic(job) as replies:
        control.wait_committed(control.push("step-1", checkpoints[1]))
    check(replies, {1, 2})
    assert serves(job, control, "step-1") == 2
    assert difference(first, logprobs(job)) > OTHER
    assert replies[-1].body["headrace"]["epochs"] == [2]


def test_the_command_line_shows_it(job: dict[str, Any], control: Control, headrace: Headrace) -> None:
    shown = headrace.run("weights", "status", NAME, "--json", timeout_s=60)
    assert shown.returncode == 0, shown.stderr
    assert '"version": "step-1"' in shown.stdout
    refused = headrace.run("weights", "push", NAME, str(headrace.home / "nothing"), timeout_s=60)
    assert (refused.returncode, "neither a folder nor a file" in refused.stderr) == (1, True)
    history = headrace.run("weights", "history", NAME, timeout_s=60)
    assert "committed" in history.stdout


def test_the_control_plane_is_killed_in_the_middle(
    job: dict[str, Any], control: Control, checkpoints: tuple[Path, Path], first: list[list[float]]
) -> None:
    number = control.push("step-2", checkpoints[0])
    began = ("pause_prefill", "freeze", "pause_decode", "load")

    def is_in_the_middle() -> bool:
        course = control.get("/weights")["course"]
        return course is not None and course["update"] == number and course["phase"] in began

    deadline = time.monotonic() + 60
    while not is_in_the_middle():
        assert time.monotonic() < deadline, control.get("/weights")
    control.kill()
    control.start()
    with traffic(job) as replies:
        control.wait_committed(number)
    check(replies, {serves(job, control, "step-2")})
    assert difference(first, logprobs(job)) < SAME


def test_rolling_while_requests_run(
    job: dict[str, Any], control: Control, checkpoints: tuple[Path, Path], first: list[list[float]]
) -> None:
    before = serves(job, control, "step-2")
    with traffic(job) as replies:
        control.wait_committed(control.push("step-3", checkpoints[1], strategy="rolling"))
    after = serves(job, control, "step-3")
    check(replies, {before, after})
    assert difference(first, logprobs(job)) > OTHER


def test_vllms_own_client_drives_the_whole_fleet(
    job: dict[str, Any], control: Control, checkpoints: tuple[Path, Path], first: list[list[float]]
) -> None:
    from vllm.distributed.weight_transfer.clients import HTTPVLLMWeightSyncClient

    client = HTTPVLLMWeightSyncClient(f"http://trainer:{TOKEN}@127.0.0.1:{CONTROL_PORT}/jobs/{NAME}/rlhf")
    client.init_weight_transfer_engine({})
    client.start_weight_update()
    client.update_weights({"source": {"transport": "path", "path": str(checkpoints[0])}})
    client.finish_weight_update("step-4")
    serves(job, control, "step-4")
    assert difference(first, logprobs(job)) < SAME


def test_older_epochs_leave_the_pool(job: dict[str, Any], control: Control) -> None:
    wait_until(lambda: f"older epochs are purged: {control.get('/weights')}", lambda: not to_purge(control))
    url = str(job["pool"]["metrics_url"]).replace("/metrics", "/get_all_keys")
    epoch = control.get("/weights")["served"]["epoch"]
    own = [
        key for key in httpx.get(url, timeout=30, trust_env=False).text.split() if job["pool"]["cache_prefix"] in key
    ]
    assert own
    assert {key for key in own if f"{job['pool']['cache_prefix']}.{epoch}@" not in key} == set()


def to_purge(control: Control) -> list[int]:
    weights = control.get("/weights")
    found: list[int] = weights["to_purge"]
    return found


@pytest.mark.full
def test_a41_a_killed_engine_comes_back_to_what_is_served(
    job: dict[str, Any], control: Control, checkpoints: tuple[Path, Path], first: list[list[float]]
) -> None:
    control.wait_committed(control.push("step-5", checkpoints[1]))
    epoch = serves(job, control, "step-5")
    other = logprobs(job)
    pid = next(unit["pid"] for unit in control.get("")["units"] if unit["name"] == "decode-1")
    os.kill(pid, signal.SIGKILL)
    with traffic(job, clients=1) as replies:
        wait_until(
            lambda: f"decode-1 serves again: {router_state(job)['replicas']}",
            lambda: is_back(job, "decode-1", epoch, pid, control),
            timeout_s=UP_TIMEOUT_S,
        )
    check(replies, {epoch})
    assert difference(other, logprobs(job)) < SAME
    assert difference(first, other) > OTHER


def is_back(job: dict[str, Any], name: str, epoch: int, old_pid: int, control: Control) -> bool:
    pid = next(unit["pid"] for unit in control.get("")["units"] if unit["name"] == name)
    replica = next(each for each in router_state(job)["replicas"] if each["name"] == name)
    return pid != old_pid and replica["usable"] and replica["epoch"] == epoch
