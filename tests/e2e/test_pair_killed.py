"""kill -9 on all processes of the job that the modules before have used, then `headrace down`: nothing of it is left.
Nobody else's process is touched."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.harness import JOB_PROCESSES, PAIR, Headrace, down_leaves_nothing, unit_pid, wait_until

pytestmark = [pytest.mark.stack, pytest.mark.timeout(900)]

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


def test_a32_every_process_killed_one_after_another(
    headrace: Headrace, pair: dict[str, Any], unrelated_master: subprocess.Popen[bytes]
) -> None:
    """The job loses all its leading processes by SIGKILL; engine cores and workers outlive theirs at first."""
    try:
        for process in JOB_PROCESSES:
            os.kill(unit_pid(pair, process), signal.SIGKILL)
        wait_until("all leaders are seen dead", lambda: _states(headrace) == {"dead"})
        assert headrace.status(PAIR)["phase"] in ("degraded", "failed")
    finally:
        down_leaves_nothing(headrace, PAIR)
    assert unrelated_master.poll() is None


def _states(headrace: Headrace) -> set[str]:
    return {unit["state"] for unit in headrace.status(PAIR)["units"]}
