from __future__ import annotations

import pytest

from router.core.table import LegFailure, Member, ProbeFailure
from tests.unit.router.fleets import make_member


def up(member: Member) -> Member:
    member.epoch = 1
    member.probe_passed(0.0)
    assert member.usable
    return member


def test_nothing_is_usable_before_its_first_good_probe_and_its_epoch() -> None:
    for first in ("probe", "epoch"):
        member = make_member("a")
        assert not member.usable
        if first == "probe":
            member.probe_passed(0.0)
        else:
            member.epoch = 1
        assert not member.usable
        up(member)


def test_a_draining_replica_takes_no_leg_until_it_is_no_longer_drained() -> None:
    member = up(make_member("a"))
    member.draining = True
    assert not member.usable
    member.draining = False
    assert member.usable


def usable_after(member: Member, probes: int, failure: ProbeFailure, now: float = 0.0) -> list[bool]:
    seen = []
    for _ in range(probes):
        member.probe_failed(failure, now)
        seen.append(member.usable)
    return seen


def test_probes_take_out_at_the_threshold_and_one_brings_back() -> None:
    member = up(make_member("a"))
    assert usable_after(member, 4, "refused") == [True, True, False, False]
    member.probe_passed(0.0)
    assert member.usable


def test_a_good_probe_forgets_the_bad_ones() -> None:
    member = up(make_member("a"))
    for _ in range(3):
        assert usable_after(member, 1, "refused") == [True]
        assert usable_after(member, 1, "slow") == [True]
        member.probe_passed(0.0)


def test_a15_slow_probes_take_out_a_replica_of_which_nothing_else_is_heard() -> None:
    member = up(make_member("a"))
    member.heard_at = 10.0
    assert usable_after(member, 5, "slow", 15.9) == [True] * 5
    assert usable_after(member, 1, "slow", 16.0) == [False]
    member.heard_at = 16.0
    assert usable_after(member, 1, "slow", 16.0) == [False], "only an answer to a probe brings it back"


def test_a15_a_refused_probe_counts_also_for_a_replica_that_sent() -> None:
    member = up(make_member("a"))
    member.heard_at = 10.0
    assert usable_after(member, 3, "refused", 10.0) == [True, True, False]


@pytest.mark.parametrize("failure", ["broken", "timeout", "engine_error"])
def test_failed_legs_in_a_row_take_out(failure: LegFailure) -> None:
    member = up(make_member("a"))
    member.leg_failed(failure, 0.0)
    member.breaker.leg_succeeded()
    member.leg_failed(failure, 0.0)
    assert member.usable
    member.leg_failed(failure, 0.0)
    assert not member.usable


def test_a_replica_without_a_connection_is_out_at_once() -> None:
    member = up(make_member("a"))
    member.leg_failed("unreachable", 0.0)
    assert not member.usable


def test_after_its_rest_one_probe_brings_it_back_on_trial_with_room_for_one_leg() -> None:
    member = up(make_member("a", max_legs=5))
    member.leg_failed("unreachable", 10.0)
    member.probe_passed(10.5)
    assert not member.usable
    member.probe_passed(11.0)
    assert (member.usable, member.has_room) == (True, True)
    member.legs = 1
    assert not member.has_room
    member.breaker.leg_succeeded()
    assert member.has_room


@pytest.mark.parametrize(("most", "legs", "room"), [(None, 10**6, True), (2, 1, True), (2, 2, False)])
def test_room_is_what_the_settings_allow(most: int | None, legs: int, room: bool) -> None:
    member = up(make_member("a", max_legs=most))
    member.legs = legs
    assert member.has_room is room
