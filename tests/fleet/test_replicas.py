"""Replicas that are added, removed, drained and restarted while requests run: nobody is refused, and every reply is
what the weights give."""

from __future__ import annotations

from typing import Any

import pytest

from tests.e2e.harness import engine_url, router_state, wait_until
from tests.fleet.control import Control
from tests.fleet.job import serves
from tests.fleet.traffic import check, served, traffic

pytestmark = [pytest.mark.stack, pytest.mark.timeout(900)]


def usable(job: dict[str, Any]) -> dict[str, int]:
    return {each["name"]: each["epoch"] for each in router_state(job)["replicas"] if each["usable"]}


def test_a_role_is_scaled_out_and_in(job: dict[str, Any], control: Control) -> None:
    push = control.update()
    epoch = serves(job, control, push.version)
    with traffic(job, clients=3) as replies:
        assert control.request("/roles/decode/scale", {"replicas": 3}) == "done"
        assert usable(job)["decode-2"] == epoch
        wait_until(
            "the new engine is asked", lambda: any(each.label["decode"] == "decode-2" for each in served(replies))
        )
        assert control.request("/roles/decode/scale", {"replicas": 2}) == "done"
    check(replies, {epoch: push.version})
    assert serves(job, control, push.version) == epoch
    assert [unit["name"] for unit in control.status()["units"] if unit["name"].startswith("decode")] == [
        "decode-0",
        "decode-1",
    ]


@pytest.mark.full
def test_replicas_are_drained_and_restarted(job: dict[str, Any], control: Control) -> None:
    push = control.update()
    epoch, before = serves(job, control, push.version), control.status()
    with traffic(job, clients=3) as replies:
        assert control.request("/replicas/decode-1/drain", {}) == "done"
        assert "decode-1" not in usable(job)
        assert control.request("/replicas/decode-1/undrain") == "done"
        for name in ("prefill-1", "decode-0"):
            assert control.request(f"/processes/{name}/restart", {}) == "done"
    check(replies, {epoch: push.version})
    after = control.status()
    assert serves(job, control, push.version) == epoch
    for name in ("prefill-1", "decode-0"):
        assert engine_url(before, name) == engine_url(after, name)


@pytest.mark.full
@pytest.mark.parametrize("moment", ["asked", "started", "gone"])
def test_the_control_plane_is_killed_while_a_role_is_scaled(job: dict[str, Any], control: Control, moment: str) -> None:
    """Killed as soon as it is asked, while the new engine comes up, or while the last one leaves."""
    push = control.update()
    epoch = serves(job, control, push.version)
    with traffic(job) as replies:
        number = control.ask("/roles/decode/scale", {"replicas": 3})
        if moment != "gone":
            wait_until("it has come so far", lambda: moment == "asked" or pid_of(control, "decode-2") is not None)
            control.kill()
            control.start()
        assert control.ended(number) == "done"
        assert usable(job)["decode-2"] == epoch
        number = control.ask("/roles/decode/scale", {"replicas": 2})
        if moment == "gone":
            wait_until("it leaves", lambda: "decode-2" not in usable(job))
            control.kill()
            control.start()
        assert control.ended(number) == "done"
    check(replies, {epoch: push.version})
    assert serves(job, control, push.version) == epoch
    assert {unit["name"] for unit in control.status()["units"]} == {unit["name"] for unit in job["units"]}


def pid_of(control: Control, name: str) -> int | None:
    return next((unit["pid"] for unit in control.status()["units"] if unit["name"] == name), None)
