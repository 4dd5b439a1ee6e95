"""kill -9 on real processes, then `headrace down`: nothing of the job is left, and nobody else's process is touched."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.harness import Headrace, run_id, run_pids, split_job, wait_until

pytestmark = [pytest.mark.stack, pytest.mark.timeout(900)]

GONE_WITHIN_S = 10
PROCESSES = ("mooncake-master", "storage-prefill-0", "prefill-0", "decode-0", "router", "prometheus")
UNRELATED_RPC_PORT = 9471
UNRELATED_METRICS_PORT = 9472


@pytest.fixture
def unrelated_master() -> Iterator[subprocess.Popen[bytes]]:
    """A mooncake_master that is none of the job's."""
    name = str(Path(sys.executable).parent / "mooncake_master")
    ports = [f"--rpc_port={UNRELATED_RPC_PORT}", f"--metrics_port={UNRELATED_METRICS_PORT}"]
    hosts = ["--rpc_address=127.0.0.1", "--metrics_host=127.0.0.1"]
    process = subprocess.Popen([name, *hosts, *ports], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def down_leaves_nothing(headrace: Headrace, name: str) -> None:
    mark = run_id(headrace, name)
    headrace.down(name)
    deadline = time.monotonic() + GONE_WITHIN_S
    while run_pids(mark):
        assert time.monotonic() < deadline, run_pids(mark)
        time.sleep(0.2)


def unit_pid(status: dict[str, Any], name: str) -> int:
    return next(int(unit["pid"]) for unit in status["units"] if unit["name"] == name)


def test_a32_every_process_killed_one_after_another(
    headrace: Headrace, tiny_model: Path, unrelated_master: subprocess.Popen[bytes]
) -> None:
    """One running job loses all its leading processes by SIGKILL; engine cores and workers outlive theirs at first."""
    name = "killed"
    status = headrace.up(split_job(name, tiny_model, 9441))
    try:
        for process in PROCESSES:
            os.kill(unit_pid(status, process), signal.SIGKILL)
        wait_until("all leaders are seen dead", lambda: _states(headrace, name) == {"dead"})
        assert headrace.status(name)["phase"] in ("degraded", "failed")
    finally:
        down_leaves_nothing(headrace, name)
    assert unrelated_master.poll() is None


@pytest.mark.full
@pytest.mark.parametrize("process", PROCESSES)
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


def _states(headrace: Headrace, name: str) -> set[str]:
    return {unit["state"] for unit in headrace.status(name)["units"]}


def _started(headrace: Headrace, name: str, process: str) -> bool:
    done = headrace.run("status", name, "--json", timeout_s=60)
    if done.returncode != 0:
        return False
    return any(unit["name"] == process and unit["pid"] for unit in json.loads(done.stdout)["units"])
