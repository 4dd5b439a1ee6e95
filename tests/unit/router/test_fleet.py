"""Placement, pins and lives of replicas."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from router.core.asks import LegEnd
from router.core.fleet import Fleet, ReplicaLost
from router.core.records import PinRecord, SessionRecord
from router.settings import EngineRole
from tests.unit.router.fleets import bring_up, end, epochs_of, fail_to_connect, is_idle, make_fleet, place, take_out


@pytest.mark.parametrize("role", ["prefill", "decode"])
@pytest.mark.parametrize("away", ["probes", "drain"])
def test_a11_serial_sessions_are_even_also_around_a_drain(role: EngineRole, away: str) -> None:
    counts: dict[str, Any] = {role: 4}
    fleet = make_fleet(**counts)
    chosen: Counter[str] = Counter()
    for number in range(8):
        if number == 3:
            take_out(fleet, f"{role}-2") if away == "probes" else fleet.drain(f"{role}-2")
        if number == 5:
            fleet.probe_passed(f"{role}-2", 0.0) if away == "probes" else fleet.drain(f"{role}-2", False)
        session = fleet.sessions.begin_request(f"s{number}")
        made = place(fleet, session, role, tokens=10)
        chosen[made.member.name] += 1
        end(fleet, made)
        fleet.end_request(session, 0.0)
        fleet.finish_session(f"s{number}")
    assert max(chosen.values()) - min(chosen.values()) <= 1
    assert len(chosen) == 4


def test_a_burst_spreads_because_the_choice_reserves() -> None:
    fleet = make_fleet(decode=4)
    for _ in range(8):
        place(fleet, fleet.sessions.begin_request(None))
    assert [view.active_sessions for view in fleet.views()] == [2, 2, 2, 2]
    assert [view.legs_in_flight for view in fleet.views()] == [2, 2, 2, 2]


def test_prefill_and_decode_are_pinned_independently() -> None:
    fleet = make_fleet(prefill=2, decode=2)
    session = fleet.sessions.begin_request("s")
    prefill, decode = place(fleet, session, "prefill"), place(fleet, session, "decode")
    fail_to_connect(fleet, prefill.member.name)
    moved, stays = place(fleet, session, "prefill"), place(fleet, session, "decode")
    assert (moved.member is prefill.member, moved.reason) == (False, "moved_lost")
    assert (stays.member is decode.member, stays.reason) == (True, "pinned")


def test_a12_a_lost_replica_keeps_no_session_and_its_legs_end_well() -> None:
    fleet = make_fleet(decode=2)
    session = fleet.sessions.begin_request("s")
    made = place(fleet, session, tokens=7)
    lost = made.member
    take_out(fleet, lost.name)
    assert (lost.sessions, lost.legs, lost.tokens) == (0, 1, 7)
    moved = place(fleet, session)
    assert (moved.member is lost, moved.reason) == (False, "moved_lost")
    bring_up(fleet, lost.name)
    assert place(fleet, session).member is moved.member
    for ticket in (1, 2, 3):
        fleet.end_leg(LegEnd(ticket=ticket, outcome="cancelled"), 0.0)
    fleet.end_request(session, 0.0)
    fleet.finish_session("s")
    assert is_idle(fleet)


def test_a12_sessions_end_by_finish_by_idleness_and_with_their_request_and_twice_is_fine() -> None:
    fleet = make_fleet(prefill=2, decode=2, policy={"type": "sticky_least_loaded", "session_idle_s": 10.0})
    for name in ("finished", "idle", None):
        session = fleet.sessions.begin_request(name)
        for role in ("prefill", "decode"):
            end(fleet, place(fleet, session, role), "broken" if name is None else "ok")
        fleet.end_request(session, 0.0)
    assert sum(view.active_sessions for view in fleet.views()) == 4
    fleet.finish_session("finished")
    fleet.finish_session("finished")
    assert sum(view.active_sessions for view in fleet.views()) == 2
    fleet.expire_sessions(9.9)
    assert sum(view.active_sessions for view in fleet.views()) == 2
    fleet.expire_sessions(10.0)
    assert is_idle(fleet)


def test_a_place_is_given_back_once() -> None:
    fleet = make_fleet(decode=1)
    made = place(fleet, fleet.sessions.begin_request("s"))
    end(fleet, made)
    with pytest.raises(AssertionError, match="given back before"):
        end(fleet, made)


def test_a_replica_takes_so_many_legs_and_then_none() -> None:
    fleet = make_fleet(decode=2, max_legs_per_replica=2)
    made = [place(fleet, fleet.sessions.begin_request(None)) for _ in range(4)]
    assert Counter(each.member.name for each in made) == {"decode-0": 2, "decode-1": 2}
    waits = fleet.sessions.begin_request(None)
    assert fleet.place(waits, "decode", [1], tokens=1, now=0.0) is None
    assert fleet.usable_count("decode") == 2
    end(fleet, made[3])
    assert place(fleet, waits).member is made[3].member


def test_a_session_whose_replica_is_full_moves() -> None:
    fleet = make_fleet(decode=2, max_legs_per_replica=1)
    session = fleet.sessions.begin_request("s")
    first = place(fleet, session)
    second = place(fleet, session)
    assert (second.member is first.member, second.reason) == (False, "moved_full")
    assert [view.active_sessions for view in fleet.views()] == [0, 1]


def test_round_robin_moves_a_session_with_its_requests() -> None:
    fleet = make_fleet(decode=2, policy={"type": "round_robin"})
    seen = []
    for _ in range(4):
        session = fleet.sessions.begin_request("s")
        made = place(fleet, session)
        seen.append(made.member.name)
        end(fleet, made)
        fleet.end_request(session, 0.0)
    assert seen == ["decode-0", "decode-1"] * 2
    assert is_idle(fleet)


# -- epochs --------------------------------------------------------------------------------------------------


def test_nobody_is_used_before_its_epoch_is_confirmed() -> None:
    fleet = make_fleet(decode=1)
    fleet.confirm("decode-0", None)
    assert (fleet.usable_count("decode"), epochs_of(fleet, "decode")) == (0, [])
    fleet.confirm("decode-0", 7)
    assert epochs_of(fleet, "decode") == [7]


def test_epochs_with_usable_replicas_newest_first() -> None:
    fleet = make_fleet(prefill=3, decode=3)
    for number, epochs in enumerate(((1, 2), (2, 3), (3, 4))):
        fleet.confirm(f"prefill-{number}", epochs[0])
        fleet.confirm(f"decode-{number}", epochs[1])
    assert epochs_of(fleet, "prefill") == [3, 2, 1]
    assert epochs_of(fleet, "decode") == [4, 3, 2]
    assert fleet.paired == [3, 2]
    take_out(fleet, "decode-1")
    assert fleet.paired == [2]
    assert epochs_of(fleet, "colocated") == []


def test_only_the_named_epochs_are_chosen_from_and_a_pin_elsewhere_moves() -> None:
    fleet = make_fleet(decode=2)
    fleet.confirm("decode-1", 2)
    session = fleet.sessions.begin_request("s")
    old = fleet.place(session, "decode", [1], tokens=1, now=0.0)
    new = fleet.place(session, "decode", [2], tokens=1, now=0.0)
    assert old is not None
    assert new is not None
    assert (old.member.name, new.member.name) == ("decode-0", "decode-1")
    assert fleet.place(session, "decode", [3], tokens=1, now=0.0) is None


def test_a_session_stays_on_its_replica_when_that_gets_new_weights() -> None:
    fleet = make_fleet(decode=2)
    session = fleet.sessions.begin_request("s")
    before = place(fleet, session)
    end(fleet, before)
    for name in fleet.members:
        fleet.confirm(name, 2)
    after = place(fleet, session)
    assert (after.member is before.member, after.reason) == (True, "pinned")


# -- lives ---------------------------------------------------------------------------------------------------


def test_another_instance_at_the_same_address_is_another_replica() -> None:
    fleet = make_fleet(decode=2)
    told: list[ReplicaLost] = []
    fleet.report_losses(told.append)
    assert fleet.recognise("decode-0", "a", 0.0)
    assert fleet.recognise("decode-0", "a", 0.0)
    session = fleet.sessions.begin_request("s")
    made = place(fleet, session, tokens=5)
    before = made.member
    assert not fleet.recognise("decode-0", "b", 1.0)
    after = fleet.members["decode-0"]
    assert told == [ReplicaLost(replica="decode-0", instance="a", silent=True)]
    assert (after is before, after.instance, after.alive, after.epoch, after.usable) == (False, "b", True, None, False)
    assert (after.legs, before.legs, before.sessions) == (0, 1, 0)
    end(fleet, made, "unreachable")
    assert (after.legs, after.breaker.state, before.legs) == (0, "closed", 0)
    assert place(fleet, session).member.name == "decode-1"
    fleet.confirm("decode-0", 1)
    assert after.usable


def test_an_engine_that_never_said_its_instance_stays_the_same() -> None:
    fleet = make_fleet(decode=1)
    assert fleet.recognise("decode-0", "", 0.0)
    assert fleet.recognise("decode-0", "a", 0.0)
    assert fleet.members["decode-0"].instance == "a"


def test_a41_an_engine_that_comes_back_without_its_fence_is_another_life() -> None:
    fleet = make_fleet(decode=1)
    assert fleet.recognise("decode-0", "a", 0.0)
    assert not fleet.recognise("decode-0", "", 0.0)
    assert fleet.members["decode-0"].epoch is None
    assert fleet.usable_count("decode") == 0


def test_replicas_are_added_drained_and_removed() -> None:
    fleet = make_fleet(decode=1)
    session = fleet.sessions.begin_request("s")
    made = place(fleet, session)
    fleet.add(name="decode-1", role="decode", url="http://d1", instance="x")
    assert fleet.members["decode-1"].url == "http://d1"
    assert fleet.usable_count("decode") == 1
    bring_up(fleet, "decode-1")

    fleet.drain("decode-0")
    assert (made.member.sessions, made.member.legs) == (0, 1)
    assert place(fleet, session).member.name == "decode-1"
    fleet.drain("decode-0", False)
    assert fleet.usable_count("decode") == 2

    fleet.remove("decode-0")
    assert [view.name for view in fleet.views()] == ["decode-1"]
    end(fleet, made)
    assert made.member.legs == 0
    fleet.byte_seen("decode-0", 1.0)


def active(fleet: Fleet) -> dict[str, int]:
    return {view.name: view.active_sessions for view in fleet.views()}


def test_pins_outlive_the_router_where_a_probe_finds_the_same_life() -> None:
    fleet = make_fleet(prefill=1, decode=2)
    prefill, before = PinRecord("prefill-0", "p"), PinRecord("decode-1", "before")
    fleet.restore_sessions(
        [
            SessionRecord("stays", {"prefill": prefill, "decode": PinRecord("decode-0", "d")}, 9),
            SessionRecord("half", {"prefill": prefill, "decode": before}),
            SessionRecord("gone", {"decode": PinRecord("decode-9", "x")}),
        ]
    )
    assert active(fleet) == {"prefill-0": 0, "decode-0": 0, "decode-1": 0}
    for name, instance in (("prefill-0", "p"), ("decode-0", "d"), ("decode-1", "after")):
        assert fleet.recognise(name, instance, 5.0)
    assert active(fleet) == {"prefill-0": 2, "decode-0": 1, "decode-1": 0}
    assert place(fleet, fleet.sessions.begin_request("stays")).reason == "pinned"
    assert place(fleet, fleet.sessions.begin_request("half")).reason == "new"
    assert len(fleet.sessions) == 2


def test_pins_are_restored_once() -> None:
    fleet = make_fleet(decode=1)
    fleet.restore_sessions([SessionRecord("s", {"decode": PinRecord("decode-0", "d")})])
    fleet.recognise("decode-0", "d", 5.0)
    fleet.finish_session("s")
    fleet.recognise("decode-0", "d", 6.0)
    assert is_idle(fleet)


def test_a_session_that_has_moved_on_before_its_replica_was_found_stays_where_it_is() -> None:
    fleet = make_fleet(decode=2)
    fleet.restore_sessions([SessionRecord("s", {"decode": PinRecord("decode-1", "d")})])
    made = place(fleet, fleet.sessions.begin_request("s"))
    fleet.recognise("decode-1", "d", 5.0)
    assert made.member.name == "decode-0"
    assert active(fleet) == {"decode-0": 1, "decode-1": 0}
