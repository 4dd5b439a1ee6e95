"""New weights for a real job while requests run: a barrier, a control plane killed in the middle, vLLM's client."""

from __future__ import annotations

import os
import shutil
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.e2e.audits import ONE_BLOCK, PROMPT, ask_from_pool, audit, key_of_new_block, pool_client
from tests.e2e.harness import UP_TIMEOUT_S, Headrace, unit_pid, wait_until
from tests.e2e.updates import (
    CONTROL_PORT,
    NAME,
    OTHER,
    PROMPTS,
    SAME,
    TOKEN,
    UPDATE_S,
    Control,
    check,
    complete,
    control_plane,
    difference,
    logprobs,
    serves,
    traffic,
    two_checkpoints,
    updated_job,
)
from tests.stack.weights import nixl_trainer
from tests.stack.weights.programs import Program

pytestmark = [pytest.mark.stack, pytest.mark.timeout(900)]

PAIRS = 1


@pytest.fixture(scope="module")
def control(headrace: Headrace) -> Iterator[Control]:
    with control_plane(headrace) as control:
        yield control


@pytest.fixture(scope="module")
def checkpoints(tiny_model: Path) -> tuple[Path, Path]:
    return two_checkpoints(tiny_model)


@pytest.fixture(scope="module")
def job(control: Control, checkpoints: tuple[Path, Path]) -> Iterator[dict[str, Any]]:
    with updated_job(control, checkpoints[0], pairs=PAIRS) as job:
        yield job


@pytest.fixture(scope="module")
def first(job: dict[str, Any]) -> list[list[float]]:
    """Of the weights that the job started with."""
    return logprobs(job)


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
    assert headrace.run("weights", "cancel", NAME, timeout_s=60).returncode == 1, "it is committed"
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


def test_an_audit_where_no_request_was_kept_probes(job: dict[str, Any], headrace: Headrace) -> None:
    code, found = audit(headrace, NAME)
    (probe,) = found["audited"]
    assert (code, found["outcome"], probe["kind"]) == (0, "agrees", "probe"), found
    assert probe["cached_tokens"] > 0


def test_an_audit_of_a_request_that_came_from_the_pool(job: dict[str, Any], headrace: Headrace) -> None:
    ask_from_pool(job, PROMPT, "first")
    ask_from_pool(job, PROMPT, "second")
    code, found = audit(headrace, NAME)
    (kept,) = found["audited"]
    assert (code, found["outcome"], kept["kind"]) == (0, "agrees", "request"), found
    assert kept["cached_tokens"] > 0
    assert kept["judgement"]["compared"] > 1


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


def test_an_update_that_hangs_is_cancelled(
    job: dict[str, Any], control: Control, checkpoints: tuple[Path, Path], first: list[list[float]], headrace: Headrace
) -> None:
    epoch = serves(job, control, "step-4")
    decode = unit_pid(control.get(""), "decode-0")
    os.kill(decode, signal.SIGSTOP)
    try:
        number = control.push("step-5", checkpoints[1])
        wait_for_course(control, phase="pause_decode")
        assert headrace.run("weights", "cancel", NAME, "--no-wait", timeout_s=60).returncode == 0
        wait_for_course(control, going="off")
    finally:
        os.kill(decode, signal.SIGCONT)
    shown = headrace.run("weights", "cancel", NAME, timeout_s=UPDATE_S)
    assert (shown.returncode, "cancelled" in shown.stdout) == (0, True), shown.stderr
    assert control.outcome(number) == ("cancelled", "by request")
    wait_until("the router serves again", lambda: complete(job, PROMPTS[0], "again").status == 200)
    assert serves(job, control, "step-4") == epoch
    assert difference(first, logprobs(job)) < SAME


def test_a_trainer_is_read_in_place_and_hears_when_it_may_go_on(
    job: dict[str, Any], control: Control, checkpoints: tuple[Path, Path], first: list[list[float]]
) -> None:
    trainer = Program(nixl_trainer.run, checkpoints[1], environment={})
    try:
        source = trainer.hear("published")
        trainer.tell("wait", None, 10 * UPDATE_S)
        control.wait_committed(control.push_source(source))
        assert trainer.hear("done") == 0, "no reader was cut off"
    finally:
        trainer.stop()
    serves(job, control, source["version"])
    read_in_place = logprobs(job)
    assert difference(first, read_in_place) > OTHER
    control.wait_committed(control.push("step-5b", checkpoints[1]))
    assert difference(read_in_place, logprobs(job)) < SAME


def test_an_engine_that_is_killed_loads_what_is_served_from_its_peer(
    job: dict[str, Any],
    control: Control,
    checkpoints: tuple[Path, Path],
    first: list[list[float]],
    tmp_path: Path,
) -> None:
    """The folder that the version came from is gone since."""
    folder = tmp_path / "step-6"
    shutil.copytree(checkpoints[1], folder)
    # A CPU packs weights when they are loaded, so what an engine can serve is its copy in host memory.
    control.wait_committed(control.push("step-6", folder, load_mode="cpu_prefetch"))
    of_step_6 = logprobs(job)
    assert difference(first, of_step_6) > OTHER
    shutil.rmtree(folder)
    os.kill(unit_pid(control.get(""), "decode-0"), signal.SIGKILL)
    joined = "decode-0 has loaded version step-6 from prefill-0"
    wait_until(
        lambda: f"the engine joins: {control.get('/weights')} {remarks(control)}",
        lambda: joined in remarks(control) and control.get("/weights")["course"] is None,
        timeout_s=UP_TIMEOUT_S,
    )
    wait_until("the router serves again", lambda: complete(job, PROMPTS[0], "again").status == 200)
    serves(job, control, "step-6")
    assert difference(of_step_6, logprobs(job)) < SAME


def test_older_epochs_leave_the_pool(job: dict[str, Any], control: Control) -> None:
    wait_until(lambda: f"older epochs are purged: {control.get('/weights')}", lambda: not to_purge(control))
    url = str(job["pool"]["metrics_url"]).replace("/metrics", "/get_all_keys")
    epoch = control.get("/weights")["served"]["epoch"]
    own = [
        key for key in httpx.get(url, timeout=30, trust_env=False).text.split() if job["pool"]["cache_prefix"] in key
    ]
    assert own
    assert {key for key in own if f"{job['pool']['cache_prefix']}.{epoch}@" not in key} == set()


def test_an_audit_passes_over_requests_of_an_epoch_that_has_gone(job: dict[str, Any], headrace: Headrace) -> None:
    code, found = audit(headrace, NAME)
    kept, probe = found["audited"]
    assert "has gone" in kept["skipped"]
    assert (code, probe["kind"], found["outcome"]) == (0, "probe", "agrees"), found


def test_an_audit_finds_kv_of_older_weights(
    job: dict[str, Any], control: Control, checkpoints: tuple[Path, Path], headrace: Headrace
) -> None:
    """A block that was computed under the weights before lies where one of these weights is looked for."""
    with pool_client(job) as pool:
        old = pool.get(key_of_new_block(job, epoch_of(control), "third"))
        control.wait_committed(control.push("step-7", checkpoints[0]))
        key = key_of_new_block(job, epoch_of(control), "fourth")
        assert pool.upsert(key, old) == 0
    ask_from_pool(job, ONE_BLOCK, "fifth")
    code, found = audit(headrace, NAME)
    (kept,) = found["audited"]
    assert (code, kept["finding"], kept["keys"]) == (1, "stale or corrupt KV", [key]), found
    assert kept["judgement"]["off_by"] > 10 * kept["judgement"]["allowed"]


def epoch_of(control: Control) -> int:
    return int(control.get("/weights")["served"]["epoch"])


def wait_for_course(control: Control, **wanted: str) -> None:
    def is_there() -> bool:
        course = control.get("/weights")["course"]
        return course is not None and {name: course[name] for name in wanted} == wanted

    wait_until(lambda: f"the update is at {wanted}: {control.get('/weights')}", is_there)


def remarks(control: Control) -> list[str]:
    return [remark["text"] for remark in control.get("/weights/updates")["remarks"]]


def to_purge(control: Control) -> list[int]:
    weights = control.get("/weights")
    found: list[int] = weights["to_purge"]
    return found
