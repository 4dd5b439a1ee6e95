"""Starts that cannot work: each ends within its limit with one clear message, exit code not 0, nothing left running."""

from __future__ import annotations

import json
import shutil
import socket
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.harness import Headrace, run_id, run_pids, split_job

pytestmark = [pytest.mark.stack, pytest.mark.timeout(300)]


def fails(headrace: Headrace, table: dict[str, Any], within_s: float, *, prefix: tuple[str, ...] = ()) -> str:
    """Run `up`; it must fail within the limit with a message and no traceback of ours. Returns what it said."""
    path = headrace.write_job(table)
    started = time.monotonic()
    done = subprocess.run(
        [*prefix, *headrace.command("up", str(path))],
        env=headrace.environment,
        capture_output=True,
        text=True,
        timeout=within_s + 60,
        check=False,
        stdin=subprocess.DEVNULL,
    )
    took_s = time.monotonic() - started
    if done.returncode == 0:
        headrace.down(table["name"])
    # Refused by its plan, or begun and failed.
    assert done.returncode in (1, 2), done.stdout + done.stderr
    assert took_s < within_s
    assert "Traceback" not in done.stderr.split("log:")[0]
    return done.stderr


def test_wrong_model_path(headrace: Headrace) -> None:
    said = fails(headrace, split_job("no-model", Path("/no/such/model"), 9451), within_s=30)
    assert "model.path" in said
    assert "/no/such/model" in said
    assert headrace.run("status", "no-model", timeout_s=60).returncode == 5


def test_engine_dies_at_start(headrace: Headrace, tiny_model: Path, tmp_path: Path) -> None:
    broken = tmp_path / "broken model"
    shutil.copytree(tiny_model, broken)
    config = json.loads((broken / "config.json").read_text())
    (broken / "config.json").write_text(
        json.dumps({**config, "architectures": ["NoSuchModel"], "model_type": "nosuch"})
    )
    said = fails(headrace, split_job("dies", broken, 9452), within_s=240)
    assert "prefill-0 ended" in said or "decode-0 ended" in said
    assert "cause:" in said
    assert "nosuch" in said
    assert "log: " in said
    assert_nothing_left(headrace, "dies")


def test_a29_taken_port(headrace: Headrace, tiny_model: Path) -> None:
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 9453))
        holder.listen()
        said = fails(headrace, split_job("taken", tiny_model, 9453), within_s=30)
    assert "9453" in said
    assert "router" in said
    status = headrace.status("taken")
    assert {unit["state"] for unit in status["units"]} == {"waiting"}
    assert_nothing_left(headrace, "taken")


def test_engine_too_slow(headrace: Headrace, tiny_model: Path) -> None:
    table = split_job("slow", tiny_model, 9454, launch={"ready_timeout": "3s"})
    said = fails(headrace, table, within_s=120)
    assert "was not ready within 3 s" in said
    assert_nothing_left(headrace, "slow")


def hiding_libibverbs() -> tuple[str, ...]:
    """A command prefix under which libibverbs is an empty file, in a mount namespace of its own (needs root)."""
    listing = subprocess.run(["/sbin/ldconfig", "-p"], capture_output=True, text=True, check=True).stdout
    path = next(line.split(" => ")[1] for line in listing.splitlines() if "libibverbs.so.1" in line)
    hide = f'mount --bind /dev/null "{Path(path).resolve()}" && exec "$@"'
    return ("unshare", "--mount", "sh", "-c", hide, "sh")


def test_missing_system_library(headrace: Headrace, tiny_model: Path) -> None:
    table = split_job("no-library", tiny_model, 9455)
    said = fails(headrace, table, within_s=60, prefix=hiding_libibverbs())
    assert "mooncake-master" in said
    assert "libibverbs.so.1" in said
    assert_nothing_left(headrace, "no-library")


def test_doctor_names_the_package_of_a_missing_library(headrace: Headrace) -> None:
    command = [*hiding_libibverbs(), *headrace.command("doctor")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False, env=headrace.environment)
    assert done.returncode == 1
    assert "apt-get install libibverbs1" in done.stdout


def assert_nothing_left(headrace: Headrace, name: str) -> None:
    status = headrace.status(name)
    assert status["phase"] == "failed"
    assert status["reason"]
    assert not run_pids(run_id(headrace, name))
