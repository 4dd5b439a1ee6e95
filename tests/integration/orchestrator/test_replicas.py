"""Restarts and drains of single processes of a running job, on threads and a real record: two pairs of engines."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from orchestrator.errors import RequestRefused, RequestUnknown, UpdateRefused
from orchestrator.store.updates import CoordinatorReplaced
from orchestrator.supervisor import mounts, restarts
from orchestrator.weight_service import PushOptions
from orchestrator.weights.journal import Journal
from orchestrator.weights.receivers import FIRST_VERSION
from tests.fakes.fake_launch import FakeFleet
from tests.integration.orchestrator.kept_fleet import (
    LIMITS,
    QUICK,
    SOURCE,
    STEADY,
    ended,
    impatient,
    job_of,
    lives,
    pushed,
    serving,
    supervised,
    until,
    usable,
)

pytestmark = pytest.mark.usefixtures("quick")


@pytest.fixture
def fleet(two_pairs: FakeFleet) -> FakeFleet:
    return two_pairs


def test_a_restarted_engine_has_run_out_of_requests_before_it_ends(fleet: FakeFleet) -> None:
    fleet.receivers.legs = {"prefill-0": 2}
    with supervised(fleet):
        request = fleet.replicas().restart("demo", "prefill-0", force=False)
        until(lambda: fleet.receivers.router.replicas["prefill-0"].draining)
        time.sleep(0.1)
        assert lives(fleet, "prefill-0") == 1
        assert "prefill-0 is being restarted: by request" in fleet.service().view("demo").reason
        fleet.receivers.legs = {}
        assert ended(fleet, request).outcome == "done"
        assert usable(fleet) == set(fleet.receivers.engines)
    assert (lives(fleet, "prefill-0"), fleet.receivers.settled) == (2, ["prefill-0"])
    assert fleet.service().view("demo").phase == "ready"
    assert fleet.keeping.ends("demo") == {}


def test_requests_that_do_not_run_out_are_not_waited_for_for_ever(tmp_path: Path) -> None:
    fleet = FakeFleet(tmp_path, pairs=2)
    fleet.record(fleet.plan(weights={"limits": {**LIMITS, "drain": 0.2}}))
    fleet.supervision().open(fleet.bring_up())
    fleet.machine.on_start = lambda name: fleet.receivers.boot(name) if name in fleet.receivers.engines else None
    fleet.receivers.legs = {"decode-1": 1}
    with supervised(fleet):
        assert ended(fleet, fleet.replicas().restart("demo", "decode-1", force=False)).outcome == "done"
        drained = ended(fleet, fleet.replicas().drain("demo", "decode-0", force=True))
        assert (drained.outcome, drained.note) == ("done", "")
    assert lives(fleet, "decode-1") == 2


def test_a_drained_replica_gets_neither_requests_nor_weights_until_it_is_undrained(fleet: FakeFleet) -> None:
    with supervised(fleet):
        assert ended(fleet, fleet.replicas().drain("demo", "decode-1", force=False)).outcome == "done"
        assert "decode-1 is drained" in fleet.service().view("demo").reason
    # By whoever supervises next as well.
    with supervised(fleet):
        pushed(fleet)
        until(lambda: usable(fleet) == {"prefill-0", "prefill-1", "decode-0"})
        assert fleet.receivers.engines["decode-1"].weights == FIRST_VERSION
        assert ended(fleet, fleet.replicas().undrain("demo", "decode-1")).outcome == "done"
        assert usable(fleet) == set(fleet.receivers.engines)
        assert fleet.receivers.engines["decode-1"].weights == "step-1"


def test_a_drained_replica_that_is_restarted_stays_drained(fleet: FakeFleet) -> None:
    with supervised(fleet):
        assert ended(fleet, fleet.replicas().drain("demo", "decode-1", force=False)).outcome == "done"
        assert ended(fleet, fleet.replicas().restart("demo", "decode-1", force=False)).outcome == "done"
        time.sleep(0.1)
        assert (lives(fleet, "decode-1"), usable(fleet)) == (2, {"prefill-0", "prefill-1", "decode-0"})


def test_what_would_leave_no_pair_is_refused_unless_it_is_forced(fleet: FakeFleet) -> None:
    with supervised(fleet):
        assert ended(fleet, fleet.replicas().drain("demo", "prefill-0", force=False)).outcome == "done"
        left = "without prefill-1 only decode-0, decode-1 would serve"
        with pytest.raises(RequestRefused, match=left):
            fleet.replicas().restart("demo", "prefill-1", force=False)
        with pytest.raises(RequestRefused, match="the job has one router"):
            fleet.replicas().restart("demo", "router", force=False)
        assert fleet.replicas().requests("demo", 9)[1:] == []
        assert ended(fleet, fleet.replicas().restart("demo", "prefill-1", force=True)).outcome == "done"
        assert ended(fleet, fleet.replicas().restart("demo", "router", force=True)).outcome == "done"


def test_the_second_of_two_that_would_leave_no_pair_together_is_refused(fleet: FakeFleet) -> None:
    fleet.replicas().drain("demo", "prefill-0", force=False)
    with pytest.raises(RequestRefused, match="without prefill-1"):
        fleet.replicas().restart("demo", "prefill-1", force=False)
    with pytest.raises(RequestRefused, match="request 1 about prefill-0 has not ended yet"):
        fleet.replicas().restart("demo", "prefill-0", force=True)


def test_what_is_not_there_or_not_drained_is_said(fleet: FakeFleet) -> None:
    with pytest.raises(RequestUnknown, match=r"no process 'decode-9'; it has: mooncake-master, storage"):
        fleet.replicas().restart("demo", "decode-9", force=False)
    with pytest.raises(RequestUnknown, match="no replica 'router'; it has: prefill-0"):
        fleet.replicas().drain("demo", "router", force=True)
    with pytest.raises(RequestRefused, match="decode-0 is not drained"):
        fleet.replicas().undrain("demo", "decode-0")
    with pytest.raises(RequestUnknown, match="no request 7"):
        fleet.replicas().request("demo", 7)
    fleet.service().stop("demo")
    with pytest.raises(RequestRefused, match="is stopped"):
        fleet.replicas().restart("demo", "decode-0", force=True)


@pytest.mark.parametrize("process", ["mooncake-master", "storage-prefill-0", "router"])
def test_processes_that_are_no_engines_are_restarted_at_once(fleet: FakeFleet, process: str) -> None:
    with supervised(fleet):
        assert ended(fleet, fleet.replicas().restart("demo", process, force=True)).outcome == "done"
    assert lives(fleet, process) == 2


def test_a_restart_of_an_engine_that_is_coming_up_is_not_dropped(fleet: FakeFleet) -> None:
    fleet.probe.never_ready = {"decode-1"}
    with supervised(fleet):
        fleet.machine.kill("decode-1")
        until(lambda: all(record.pid in fleet.machine.living for record in job_of(fleet).records))
        request = fleet.replicas().restart("demo", "decode-1", force=False)
        until(lambda: lives(fleet, "decode-1") == 3)
        assert fleet.replicas().request("demo", request.number).outcome is None
        fleet.probe.never_ready = set()
        assert ended(fleet, request).outcome == "done"
        assert usable(fleet) == set(fleet.receivers.engines)
    assert lives(fleet, "decode-1") == 3


def test_a_restart_that_does_not_come_up_has_failed_with_its_first_cause(fleet: FakeFleet) -> None:
    with supervised(fleet):
        fleet.machine.on_start = lambda name: fleet.machine.kill(name, exit_code=7)
        request = ended(fleet, fleet.replicas().restart("demo", "decode-1", force=False))
    assert (request.outcome, "at first: ended with exit code 7" in request.note) == ("failed", True)


def test_a_restart_that_leads_to_nothing_that_serves_has_failed_and_holds_nobody_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(restarts, "POLICIES", dict.fromkeys(restarts.POLICIES, STEADY))
    fleet = impatient(FakeFleet(tmp_path, pairs=2))
    with supervised(fleet):
        pushed(fleet)
        fleet.receivers.load_ends = {"decode-1": "untouched"}
        request = fleet.replicas().restart("demo", "decode-1", force=False)
        behind = fleet.replicas().restart("demo", "router", force=True)
        found = ended(fleet, request)
        assert (found.outcome, found.note.endswith(" after 1.5 s")) == ("failed", True)
        assert found.note.startswith(("up, and does not serve", "not up"))
        assert ended(fleet, behind).outcome == "done"
        # It goes on being brought up.
        until(lambda: lives(fleet, "decode-1") > QUICK.budget)
        fleet.receivers.load_ends = {}
        until(lambda: usable(fleet) == set(fleet.receivers.engines))


def test_a_restart_of_what_would_not_end_has_failed_and_holds_nobody_up(tmp_path: Path) -> None:
    fleet = impatient(FakeFleet(tmp_path, pairs=2))
    fleet.machine.undying = {"decode-1"}
    with supervised(fleet):
        request = fleet.replicas().restart("demo", "decode-1", force=False)
        behind = fleet.replicas().restart("demo", "router", force=True)
        found = ended(fleet, request)
        assert (found.outcome, found.note) == ("failed", "its life before has not ended after 1.5 s")
        assert ended(fleet, behind).outcome == "done"


def test_an_undrained_replica_that_does_not_serve_in_time_is_told(tmp_path: Path) -> None:
    fleet = impatient(FakeFleet(tmp_path, pairs=2))
    with supervised(fleet):
        assert ended(fleet, fleet.replicas().drain("demo", "decode-1", force=False)).note == ""
        pushed(fleet)
        fleet.receivers.silent = {"decode-1"}
        found = ended(fleet, fleet.replicas().undrain("demo", "decode-1"))
        assert (found.outcome, found.note) == ("done", "up, and does not serve after 0.1 s")


def is_updating(fleet: FakeFleet) -> bool:
    position = fleet.weights().position("demo")
    return position is not None and position.course is not None and position.course.going == "forward"


def test_a_restart_waits_for_the_end_of_an_update(fleet: FakeFleet) -> None:
    weights = fleet.weights()
    fleet.receivers.silent = {"prefill-0"}
    with supervised(fleet):
        number = weights.push("demo", None, SOURCE, PushOptions()).number
        until(lambda: is_updating(fleet))
        request = fleet.replicas().restart("demo", "decode-1", force=False)
        time.sleep(0.1)
        assert fleet.replicas().request("demo", request.number).begun_at is None
        fleet.receivers.silent = set()
        assert ended(fleet, request).outcome == "done"
        assert weights.record("demo", number).outcome == "committed"
        assert fleet.receivers.engines["decode-1"].weights == "step-1"


def test_a_push_that_nobody_could_serve_is_refused_before_the_gate_is_closed(tmp_path: Path) -> None:
    fleet = serving(FakeFleet(tmp_path, pairs=1))
    weights = fleet.weights()
    with supervised(fleet):
        assert ended(fleet, fleet.replicas().drain("demo", "decode-0", force=True)).outcome == "done"
        with pytest.raises(UpdateRefused, match="no pair of engines is left to load new weights .*: decode-0"):
            weights.push("demo", None, SOURCE, PushOptions())
        assert (weights.newest("demo"), fleet.receivers.router.gate) == (None, "open")
        assert ended(fleet, fleet.replicas().undrain("demo", "decode-0")).outcome == "done"
        number = weights.push("demo", None, SOURCE, PushOptions()).number
        assert weights.wait("demo", number, 10).outcome == "committed"


def test_an_undrain_does_not_wait_for_the_update_that_may_need_it(fleet: FakeFleet) -> None:
    weights = fleet.weights()
    with supervised(fleet):
        assert ended(fleet, fleet.replicas().drain("demo", "decode-1", force=False)).outcome == "done"
        fleet.receivers.silent = {"prefill-0"}
        number = weights.push("demo", None, SOURCE, PushOptions()).number
        until(lambda: is_updating(fleet))
        request = fleet.replicas().undrain("demo", "decode-1")
        until(lambda: fleet.replicas().request("demo", request.number).begun_at is not None)
        assert is_updating(fleet)
        fleet.receivers.silent = set()
        assert weights.wait("demo", number, 10).outcome == "committed"
        assert ended(fleet, request).outcome == "done"
        assert fleet.receivers.engines["decode-1"].weights == "step-1"


def test_a_restart_sees_itself_through_where_nobody_supervises(fleet: FakeFleet) -> None:
    replicas = fleet.replicas()
    asks = (
        lambda: replicas.restart("demo", "decode-1", force=False),
        lambda: replicas.drain("demo", "decode-0", force=False),
        lambda: replicas.undrain("demo", "decode-0"),
    )
    for ask in asks:
        assert replicas.see_through("demo", ask().number).outcome == "done"
    assert usable(fleet) == set(fleet.receivers.engines)


def test_a_control_plane_that_died_anywhere_is_followed_by_one_that_restarts_the_engine_once(fleet: FakeFleet) -> None:
    for after in (1, 2, 4, 8, 16, 32):
        before = lives(fleet, "prefill-1")
        request = fleet.replicas().restart("demo", "prefill-1", force=False)
        turns = iter(range(60))

        def is_over(_position: object, turns: Iterator[int] = turns, after: int = after) -> bool:
            turn = next(turns, None)
            if turn == after:
                Journal(fleet.updates, "demo", job_of(fleet).run_id)
            return turn is None

        with suppress(CoordinatorReplaced):
            fleet.supervision().keep("demo", is_over)
        assert fleet.replicas().see_through("demo", request.number).outcome == "done"
        assert lives(fleet, "prefill-1") == before + 1
        assert usable(fleet) == set(fleet.receivers.engines)


def test_a17_a_prefill_engine_whose_handoffs_fail_since_a_peer_came_back_is_drained_and_restarted(
    fleet: FakeFleet,
) -> None:
    with supervised(fleet):
        fleet.receivers.handoffs_failed = {"prefill-0": 3}
        time.sleep(0.1)
        assert lives(fleet, "prefill-0") == 1, "no peer was started again: it is not to blame"
        fleet.machine.kill("decode-1")
        fleet.receivers.legs = {"prefill-0": 1}
        until(lambda: "prefill-0 is being restarted" in fleet.service().view("demo").reason)
        view = fleet.service().view("demo")
        assert view.phase == "degraded"
        assert "its last 3 handoffs failed, and decode-1 was started since" in view.reason
        assert lives(fleet, "prefill-0") == 1, "its requests run out first"
        fleet.receivers.legs = {}
        until(lambda: lives(fleet, "prefill-0") == 2)
        until(lambda: usable(fleet) == set(fleet.receivers.engines))
        time.sleep(0.1)
        assert lives(fleet, "prefill-0") == 2, "another restart would change nothing"


def test_a17_somebody_who_asks_for_the_same_meanwhile_does_not_end_the_supervision(
    fleet: FakeFleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    ask, others = fleet.keeping.ask, iter(["somebody asked for it"])

    def asked_before(*given: Any, **named: Any) -> int:
        for why in others:
            ask(*given, **{**named, "why": why})
        return ask(*given, **named)

    monkeypatch.setattr(fleet.keeping, "ask", asked_before)
    with supervised(fleet):
        fleet.receivers.handoffs_failed = {"prefill-0": 3}
        fleet.machine.kill("decode-1")
        until(lambda: fleet.replicas().requests("demo", 1) != [])
        assert ended(fleet, fleet.replicas().request("demo", 1)).outcome == "done"
    assert [each.event.kind for each in fleet.store.events.since(0, 1000, "demo")].count("job_adopted") == 1


def test_a_look_outside_that_fails_holds_up_no_request(fleet: FakeFleet, monkeypatch: pytest.MonkeyPatch) -> None:
    request = fleet.replicas().restart("demo", "mooncake-master", force=True)
    monkeypatch.setattr(fleet.receivers, "outside", lambda: {}["broken"])
    with supervised(fleet):
        assert ended(fleet, request).outcome == "done"


def test_a31_a_storage_client_that_the_master_does_not_count_is_started_again(
    fleet: FakeFleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mounts, "MOUNTS_WITHIN_S", 0.05)
    pool = job_of(fleet).plan.pool
    assert pool is not None
    (client,) = pool.clients
    mounted = frozenset({(client.address, client.name_ports[0])})
    with supervised(fleet):
        fleet.receivers.segments = mounted
        time.sleep(0.15)
        assert lives(fleet, client.name) == 1
        fleet.receivers.segments = frozenset()
        until(lambda: lives(fleet, client.name) == 2)
        fleet.receivers.segments = mounted
        until(lambda: fleet.service().view("demo").phase == "ready")


@pytest.mark.parametrize("name", ["decode-0", "mooncake-master", "storage-prefill-0"])
def test_a_crash_loop_that_the_job_can_live_with_leaves_it_degraded_with_the_first_cause(
    fleet: FakeFleet, name: str
) -> None:
    fleet.machine.on_start = lambda started: fleet.machine.kill(started, exit_code=1) if started == name else None
    with supervised(fleet):
        fleet.machine.kill(name, exit_code=42)
        until(lambda: "given up" in fleet.service().view("demo").reason)
        view = fleet.service().view("demo")
    assert view.phase == "degraded"
    assert f"{name} ended 3 times within 0 s, at first: ended with exit code 42" in view.reason
    assert lives(fleet, name) == QUICK.budget


@pytest.mark.parametrize("name", ["router", "decode-0"])
def test_a_crash_loop_that_the_job_cannot_live_with_fails_it_with_the_first_cause(tmp_path: Path, name: str) -> None:
    fleet = serving(FakeFleet(tmp_path, pairs=1))
    fleet.machine.on_start = lambda started: fleet.machine.kill(started, exit_code=1) if started == name else None
    with supervised(fleet):
        fleet.machine.kill(name, exit_code=42)
        until(lambda: fleet.store.get("demo").phase == "failed")
    assert f"{name} ended 3 times within 0 s, at first: ended with exit code 42" in job_of(fleet).reason
    assert fleet.machine.living == {}


def test_who_sees_an_update_through_is_told_that_the_job_has_failed_meanwhile(tmp_path: Path) -> None:
    fleet = serving(FakeFleet(tmp_path, pairs=1))
    fleet.receivers.silent = {"prefill-0"}
    number = fleet.weights().push("demo", None, SOURCE, PushOptions()).number
    fleet.machine.on_start = lambda started: fleet.machine.kill(started, exit_code=1)
    fleet.machine.kill("router")
    found = fleet.weights().see_through("demo", number)
    assert (found.outcome, found.why) == ("cancelled", "the job has failed")


def test_monitoring_never_takes_the_job_down(tmp_path: Path) -> None:
    fleet = FakeFleet(tmp_path, pairs=1)
    fleet.record(fleet.plan(weights={"limits": LIMITS}, monitoring={"enabled": True}))
    fleet.supervision().open(fleet.bring_up())
    fleet.machine.on_start = lambda started: fleet.machine.kill(started)
    with supervised(fleet):
        fleet.machine.kill("prometheus")
        until(lambda: "prometheus ended 3 times" in fleet.service().view("demo").reason)
        assert fleet.service().view("demo").phase == "degraded"
        assert fleet.receivers.router.has_pair()
