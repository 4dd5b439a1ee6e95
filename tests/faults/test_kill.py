"""kill -9 on real processes, then `headrace down`: nothing of the job is left. `e2e/test_pair_killed.py` kills all of
them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from pathlib import Path

import pytest

from tests.e2e.harness import (
    JOB_PROCESSES,
    Headrace,
    down_leaves_nothing,
    run_id,
    run_pids,
    split_job,
    unit_pid,
    wait_until,
)

pytestmark = [pytest.mark.stack, pytest.mark.timeout(900)]


@pytest.mark.full
@pytest.mark.parametrize("process", JOB_PROCESSES)
def test_a32_one_process_killed(headrace: Headrace, tiny_model: Path, process: str) -> None:
    name = f"killed-{process}"
    status = headrace.up(split_job(name, tiny_model, 9442))
    try:
        os.kill(unit_pid(status, process), signal.SIGKILL)
        wait_until("the status says so", lambda: process in headrace.status(name)["reason"])
    finally:
        down_leaves_nothing(headrace, name)


def test_up_itself_killed_while_engines_start(headrace: Headrace, tiny_model: Path) -> None:
    name = "orphaned"
    path = headrace.write_job(split_job(name, tiny_model, 9443))
    command = headrace.command("up", str(path))
    up = subprocess.Popen(command, env=headrace.environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        wait_until("engines are starting", lambda: _started(headrace, name, "decode-0"), timeout_s=120)
    finally:
        up.kill()
        up.wait()
    assert run_pids(run_id(headrace, name))
    status = headrace.status(name)
    assert status["phase"] == "abandoned"
    assert "headrace down" in status["reason"]
    down_leaves_nothing(headrace, name)
    assert headrace.status(name)["phase"] == "stopped"


def _started(headrace: Headrace, name: str, process: str) -> bool:
    done = headrace.run("status", name, "--json", timeout_s=60)
    if done.returncode != 0:
        return False
    return any(unit["name"] == process and unit["pid"] for unit in json.loads(done.stdout)["units"])
