"""What probes and legs say about replicas, and who is told."""

from __future__ import annotations

import pytest

from router.core.asks import LegOutcome
from router.core.fleet import Fleet, ReplicaLost
from tests.unit.router.fleets import bring_up, end, epochs_of, fail_to_connect, make_fleet, place, take_out


def losses_of(fleet: Fleet) -> list[ReplicaLost]:
    told: list[ReplicaLost] = []
    fleet.report_losses(told.append)
    return told


def lost(*, silent: bool) -> ReplicaLost:
    return ReplicaLost(replica="decode-0", instance="", silent=silent)


def test_a_loss_is_reported_and_a_busy_replica_keeps_its_streams() -> None:
    fleet = make_fleet(decode=1, probe_failures=2, silence_limit_s=6.0)
    told = losses_of(fleet)
    fleet.byte_seen("decode-0", 10.0)
    for now in (11.0, 12.0, 16.0):
        fleet.probe_failed("decode-0", "refused", now)
    assert told == [lost(silent=False), lost(silent=True)]
    fleet.probe_passed("decode-0", 18.0)
    fail_to_connect(fleet, "decode-0", 18.0)
    assert told[2:] == [lost(silent=False)]


def test_a15_slow_probes_of_a_sending_replica_report_no_loss() -> None:
    fleet = make_fleet(decode=1, silence_limit_s=6.0)
    told = losses_of(fleet)
    fleet.byte_seen("decode-0", 10.0)
    fleet.probe_failed("decode-0", "slow", 15.9)
    assert told == []
    fleet.probe_failed("decode-0", "slow", 16.0)
    assert told == [lost(silent=True)]


@pytest.mark.parametrize(
    ("outcome", "answered"),
    [("ok", True), ("client_error", True), ("engine_error", True), ("cancelled", False), ("timeout", False)],
)
def test_a15_a_leg_that_was_answered_shows_that_its_replica_does_not_hang(outcome: LegOutcome, answered: bool) -> None:
    fleet = make_fleet(decode=1, silence_limit_s=6.0)
    told = losses_of(fleet)
    leg(fleet, outcome, now=10.0)
    fleet.probe_failed("decode-0", "slow", 15.9)
    assert told == ([] if answered else [lost(silent=True)])


def leg(fleet: Fleet, outcome: LegOutcome, *, blamed: bool = True, now: float = 0.0) -> None:
    session = fleet.sessions.begin_request(None)
    end(fleet, place(fleet, session, now=now), outcome, now, blamed=blamed)
    fleet.end_request(session, now)


def test_failed_legs_in_a_row_open_the_breaker_and_end_nothing_that_runs() -> None:
    fleet = make_fleet(decode=1, leg_failures=3)
    told = losses_of(fleet)
    session = fleet.sessions.begin_request("s")
    end(fleet, place(fleet, session))
    for outcome in ("broken", "engine_error", "ok", "timeout", "broken"):
        leg(fleet, outcome)
    assert fleet.usable_count("decode") == 1
    leg(fleet, "engine_error")
    assert fleet.usable_count("decode") == 0
    assert told == []
    assert (fleet.views()[0].active_sessions, fleet.views()[0].breaker) == (1, "open")


@pytest.mark.parametrize("outcome", ["client_error", "cancelled", "expired"])
def test_a13_what_is_not_the_replicas_fault_never_counts(outcome: LegOutcome) -> None:
    fleet = make_fleet(decode=1, leg_failures=1)
    for _ in range(50):
        leg(fleet, outcome)
    assert (fleet.usable_count("decode"), fleet.views()[0].breaker) == (1, "closed")


def test_a13_a_4xx_counts_as_a_sign_of_life() -> None:
    fleet = make_fleet(decode=1, leg_failures=2)
    for outcome in ("engine_error", "client_error", "engine_error"):
        leg(fleet, outcome)
    assert fleet.usable_count("decode") == 1


def test_a_failure_without_blame_counts_for_nothing() -> None:
    fleet = make_fleet(decode=1, leg_failures=1)
    leg(fleet, "timeout", blamed=False)
    assert fleet.usable_count("decode") == 1
    leg(fleet, "timeout")
    assert fleet.usable_count("decode") == 0


def test_a_breaker_opens_tries_one_leg_and_closes_again() -> None:
    fleet = make_fleet(decode=1, breaker_open_s=1.0)
    fail_to_connect(fleet, "decode-0", 10.0)
    fleet.probe_passed("decode-0", 10.9)
    assert fleet.usable_count("decode") == 0
    fleet.probe_passed("decode-0", 11.0)
    trial = place(fleet, fleet.sessions.begin_request(None), now=11.0)
    assert fleet.place(fleet.sessions.begin_request(None), "decode", [1], tokens=1, now=11.0) is None
    end(fleet, trial, "ok", 12.0)
    assert fleet.views()[0].breaker == "closed"
    for _ in range(3):
        place(fleet, fleet.sessions.begin_request(None), now=12.0)


def test_a_trial_that_fails_rests_longer() -> None:
    fleet = make_fleet(decode=1, breaker_open_s=1.0, leg_failures=5)
    fail_to_connect(fleet, "decode-0", 0.0)
    fleet.probe_passed("decode-0", 1.0)
    leg(fleet, "engine_error", now=1.0)
    fleet.probe_passed("decode-0", 2.9)
    assert fleet.usable_count("decode") == 0
    fleet.probe_passed("decode-0", 3.0)
    assert fleet.usable_count("decode") == 1


def test_a_trial_whose_leg_says_nothing_leaves_room_for_the_next() -> None:
    fleet = make_fleet(decode=1)
    fail_to_connect(fleet, "decode-0", 0.0)
    fleet.probe_passed("decode-0", 1.0)
    leg(fleet, "cancelled", now=1.0)
    assert fleet.views()[0].breaker == "trial"
    leg(fleet, "ok", now=1.0)
    assert fleet.views()[0].breaker == "closed"


def test_dead_and_without_weights_it_needs_both_to_come_back() -> None:
    fleet = make_fleet(decode=1)
    fleet.confirm("decode-0", None)
    take_out(fleet, "decode-0")
    fleet.confirm("decode-0", 2)
    assert fleet.usable_count("decode") == 0
    bring_up(fleet, "decode-0", 2)
    assert epochs_of(fleet, "decode") == [2]
