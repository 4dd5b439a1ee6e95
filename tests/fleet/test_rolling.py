"""New weights for a fleet that never stops serving, and an engine that dies."""

from __future__ import annotations

import os
import signal
from typing import Any

import pytest

from tests.e2e.harness import UP_TIMEOUT_S, router_state, unit_pid, wait_until
from tests.fleet.control import Control
from tests.fleet.expected import SAME, expected
from tests.fleet.job import serves
from tests.fleet.traffic import check, difference, logprobs, traffic

pytestmark = [pytest.mark.stack, pytest.mark.timeout(900)]


def test_rolling_while_requests_run(job: dict[str, Any], control: Control) -> None:
    before, old_epoch = control.served()
    with traffic(job) as replies:
        push = control.update(strategy="rolling")
    check(replies, {old_epoch: before, serves(job, control, push.version): push.version})
    assert difference(expected(push.weights), logprobs(job)) < SAME


@pytest.mark.full
def test_a41_a_killed_engine_comes_back_to_what_is_served(job: dict[str, Any], control: Control) -> None:
    push = control.update()
    epoch = serves(job, control, push.version)
    pid = unit_pid(control.status(), "decode-1")
    os.kill(pid, signal.SIGKILL)
    with traffic(job, clients=1) as replies:
        wait_until(
            lambda: f"decode-1 serves again: {router_state(job)['replicas']}",
            lambda: is_back(job, "decode-1", epoch, pid, control),
            timeout_s=UP_TIMEOUT_S,
        )
    check(replies, {epoch: push.version})
    assert difference(expected(push.weights), logprobs(job)) < SAME


def is_back(job: dict[str, Any], name: str, epoch: int, old_pid: int, control: Control) -> bool:
    replica = next(each for each in router_state(job)["replicas"] if each["name"] == name)
    return unit_pid(control.status(), name) != old_pid and replica["usable"] and replica["epoch"] == epoch
