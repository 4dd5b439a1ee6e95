"""New weights for a job while requests run: a barrier, vLLM's client, a cancelled update, an engine that is killed."""

from __future__ import annotations

import os
import re
import shutil
import signal
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.e2e.harness import CALL_TIMEOUT_S, UP_TIMEOUT_S, Headrace, unit_pid, wait_until
from tests.fleet.control import PORT, TOKEN, Control
from tests.fleet.expected import OTHER, SAME, expected, weight_sets
from tests.fleet.job import NAME, serves
from tests.fleet.traffic import check, complete, difference, logprobs, traffic
from tests.fleet.versions import WEIGHTS, version_name, weights_of
from tests.stack.weights import nixl_trainer
from tests.stack.weights.programs import Program

pytestmark = [pytest.mark.stack, pytest.mark.timeout(900)]


def test_the_sets_of_weights_can_be_told_apart() -> None:
    assert difference(expected(0), expected(1)) > OTHER


def test_a_barrier_while_requests_run(job: dict[str, Any], control: Control) -> None:
    before, old_epoch = control.served()
    with traffic(job) as replies:
        push = control.update()
    epoch = serves(job, control, push.version)
    check(replies, {old_epoch: before, epoch: push.version})
    assert replies[-1].label["epochs"] == [epoch]


def test_the_command_line_shows_it(job: dict[str, Any], control: Control, headrace: Headrace) -> None:
    version = control.update().version
    shown = headrace.run("weights", "status", NAME, "--json", timeout_s=60)
    assert shown.returncode == 0, shown.stderr
    assert f'"version": "{version}"' in shown.stdout
    refused = headrace.run("weights", "push", NAME, str(headrace.home / "nothing"), timeout_s=60)
    assert headrace.run("weights", "cancel", NAME, timeout_s=60).returncode == 1, "it is committed"
    # In a frame, broken where its line ends.
    assert (refused.returncode, "neither a folder nor a file" in re.sub(r"[│\s]+", " ", refused.stderr)) == (2, True)
    history = headrace.run("weights", "history", NAME, timeout_s=60)
    assert "committed" in history.stdout


def test_vllms_own_client_drives_the_whole_fleet(job: dict[str, Any], control: Control) -> None:
    from vllm.distributed.weight_transfer.clients import HTTPVLLMWeightSyncClient

    client = HTTPVLLMWeightSyncClient(f"http://trainer:{TOKEN}@127.0.0.1:{PORT}/jobs/{NAME}/rlhf")
    client.init_weight_transfer_engine({})
    client.start_weight_update()
    client.update_weights({"source": {"transport": "path", "path": str(weight_sets()[0])}})
    version = version_name(0, push=0)
    client.finish_weight_update(version)
    serves(job, control, version)
    assert difference(expected(0), logprobs(job)) < SAME


def test_an_update_that_hangs_is_cancelled(job: dict[str, Any], control: Control, headrace: Headrace) -> None:
    version, epoch = control.served()
    decode = unit_pid(control.status(), "decode-0")
    os.kill(decode, signal.SIGSTOP)
    try:
        push = control.push()
        wait_for_course(control, phase="pause_decode")
        assert headrace.run("weights", "cancel", NAME, "--no-wait", timeout_s=60).returncode == 0
        wait_for_course(control, going="off")
    finally:
        os.kill(decode, signal.SIGCONT)
    shown = headrace.run("weights", "cancel", NAME, timeout_s=CALL_TIMEOUT_S)
    assert (shown.returncode, "cancelled" in shown.stdout) == (0, True), shown.stderr
    assert control.outcome(push) == ("cancelled", "by request")
    wait_until("the router serves again", lambda: complete(job, 0, "again").status == 200)
    assert serves(job, control, version) == epoch
    assert difference(expected(weights_of(version)), logprobs(job)) < SAME


def test_a_trainer_is_read_in_place_and_hears_when_it_may_go_on(job: dict[str, Any], control: Control) -> None:
    weights = (weights_of(control.served()[0]) + 1) % WEIGHTS
    trainer = Program(nixl_trainer.run, weight_sets()[weights], control.new_version(weights), environment={})
    try:
        source = trainer.hear("published")
        trainer.tell("wait", None, 10 * CALL_TIMEOUT_S)
        control.wait_committed(control.push_source(source))
        assert trainer.hear("done") == 0, "no reader was cut off"
    finally:
        trainer.stop()
    serves(job, control, source["version"])
    assert difference(expected(weights), logprobs(job)) < SAME


def test_an_engine_that_is_killed_loads_what_is_served_from_its_peer(
    job: dict[str, Any], control: Control, tmp_path: Path
) -> None:
    """The folder that the version came from is gone since."""
    weights, folder = 1, tmp_path / "gone"
    shutil.copytree(weight_sets()[weights], folder)
    # A CPU packs weights when they are loaded, so what an engine can serve is its copy in host memory.
    push = control.update(weights, folder, load_mode="cpu_prefetch")
    shutil.rmtree(folder)
    os.kill(unit_pid(control.status(), "decode-0"), signal.SIGKILL)
    joined = f"decode-0 has loaded version {push.version} from "
    wait_until(
        lambda: f"the engine joins: {control.get('/weights')} {remarks(control)}",
        lambda: any(each.startswith(joined) for each in remarks(control)) and control.get("/weights")["course"] is None,
        timeout_s=UP_TIMEOUT_S,
    )
    wait_until("the router serves again", lambda: complete(job, 0, "again").status == 200)
    serves(job, control, push.version)
    assert difference(expected(weights), logprobs(job)) < SAME


def test_older_epochs_leave_the_pool(job: dict[str, Any], control: Control) -> None:
    push = control.update()
    assert difference(expected(push.weights), logprobs(job)) < SAME
    wait_until(lambda: f"older epochs are purged: {control.get('/weights')}", lambda: not to_purge(control))
    current = f"{job['pool']['cache_prefix']}.{control.served()[1]}@"
    wait_until("this epoch is saved", lambda: any(key.startswith(current) for key in keys(job)))
    assert [key for key in keys(job) if not key.startswith(current)] == []


def keys(job: dict[str, Any]) -> list[str]:
    """Those of the job in the pool."""
    url = str(job["pool"]["metrics_url"]).replace("/metrics", "/get_all_keys")
    found = httpx.get(url, timeout=30, trust_env=False).text.split()
    return [key for key in found if job["pool"]["cache_prefix"] in key]


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
