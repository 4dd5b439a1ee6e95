"""New weights for a real fleet of two pairs of engines that never stops serving, and an engine that dies."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.harness import UP_TIMEOUT_S, Headrace, router_state, wait_until
from tests.e2e.updates import (
    OTHER,
    SAME,
    Control,
    check,
    control_plane,
    difference,
    logprobs,
    serves,
    traffic,
    two_checkpoints,
    updated_job,
)

pytestmark = [pytest.mark.stack, pytest.mark.full, pytest.mark.timeout(900)]

PAIRS = 2


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


def test_rolling_while_requests_run(
    job: dict[str, Any], control: Control, checkpoints: tuple[Path, Path], first: list[list[float]]
) -> None:
    before = serves(job, control, "initial")
    with traffic(job) as replies:
        control.wait_committed(control.push("step-1", checkpoints[1], strategy="rolling"))
    after = serves(job, control, "step-1")
    check(replies, {before, after})
    assert difference(first, logprobs(job)) > OTHER


def test_a41_a_killed_engine_comes_back_to_what_is_served(
    job: dict[str, Any], control: Control, checkpoints: tuple[Path, Path], first: list[list[float]]
) -> None:
    control.wait_committed(control.push("step-2", checkpoints[1]))
    epoch = serves(job, control, "step-2")
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
