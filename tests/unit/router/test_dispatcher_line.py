"""Who waits, for what, in which order, and for how long."""

from __future__ import annotations

from typing import Any

import pytest

from router.core.gate import GateState
from tests.unit.router.dispatchers import Room
from tests.unit.router.fleets import fail_to_connect, is_idle, take_out


@pytest.mark.parametrize("state", ["holding", "frozen"])
def test_a_closed_gate_holds_first_legs_and_opening_lets_them_go_in_order(state: GateState) -> None:
    room = Room(prefill=3, decode=3)
    room.gate.set(state)
    assert [room.ask(number) for number in (3, 1, 2)] == [None] * 3
    room.look()
    assert (room.told(), room.dispatcher.waiting, room.dispatcher.admitted) == ([], 3, 0)
    room.gate.set("open")
    room.look()
    assert [number for number, _ in room.told()] == [1, 2, 3]
    assert (room.dispatcher.waiting, room.dispatcher.admitted) == (0, 3)


def test_second_legs_go_while_holding_and_wait_while_frozen() -> None:
    room = Room(prefill=2, decode=2)
    one, two = room.granted(1), room.granted(2)
    room.gate.set("holding")
    assert room.granted(1, handoff_epoch=one.epoch).role == "decode"
    room.gate.set("frozen")
    assert room.ask(2, handoff_epoch=two.epoch) is None
    assert room.ask(3) is None
    room.gate.set("holding")
    room.look()
    assert [number for number, _ in room.told()] == [2]
    room.gate.set("open")
    room.look()
    assert [number for number, _ in room.told()] == [3]


def test_a_second_leg_whose_epoch_went_while_it_waited_is_refused() -> None:
    room = Room(prefill=1, decode=1)
    first = room.granted(1)
    room.gate.set("frozen")
    assert room.ask(1, handoff_epoch=first.epoch) is None
    for name in room.fleet.members:
        room.fleet.confirm(name, 2)
    room.gate.set("open")
    room.look()
    assert room.told() == [(1, "no_pair")]
    assert room.granted(1).epoch == 2


def test_a_request_that_comes_back_is_ahead_of_those_that_came_after_it() -> None:
    room = Room(colocated=1, max_legs_per_replica=1)
    running = room.granted(1)
    assert room.ask(2) is None
    assert room.ask(3) is None
    room.gate.set("holding")
    room.end(running, "cancelled")
    assert room.told() == []
    assert room.ask(1) is None
    room.gate.set("open")
    room.look()
    assert room.told() == [(1, "colocated-0")]


def test_samples_have_the_place_of_the_request_that_they_are_of() -> None:
    room = Room(colocated=1)
    room.gate.set("holding")
    assert [room.ask(number) for number in (3, 4)] == [None] * 2
    assert [room.ask(number, place=2) for number in (6, 5)] == [None] * 2
    room.gate.set("open")
    room.look()
    assert [number for number, _ in room.told()] == [5, 6, 3, 4]


def test_room_on_a_replica_goes_to_the_first_in_line() -> None:
    room = Room(colocated=1, max_legs_per_replica=1)
    running = room.granted(1)
    assert [room.ask(number) for number in (4, 2, 3)] == [None] * 3
    room.done(1, running)
    assert room.told() == [(2, "colocated-0")]


def test_each_role_has_a_line_of_its_own() -> None:
    room = Room(prefill=1, decode=1, max_legs_per_replica=1)
    first = room.granted(1)
    assert room.ask(2) is None
    room.end(first)
    assert room.told() == [(2, "prefill-0")]
    decode = room.granted(1, handoff_epoch=1)
    assert room.ask(3, handoff_epoch=1) is None
    room.done(1, decode)
    assert room.told() == [(3, "decode-0")]


def test_a_line_per_epoch_so_that_one_does_not_hold_up_the_other() -> None:
    room = Room(prefill=2, decode=2, max_legs_per_replica=1)
    room.fleet.confirm("prefill-1", 2)
    room.fleet.confirm("decode-1", 2)
    old, new = room.granted(1, handoff_epoch=1), room.granted(2, handoff_epoch=2)
    assert room.ask(3, handoff_epoch=1) is None
    assert room.ask(4, handoff_epoch=2) is None
    room.done(2, new)
    assert room.told() == [(4, "decode-1")]
    room.done(1, old)
    assert room.told() == [(3, "decode-0")]


def test_who_waits_for_a_version_holds_up_nobody_else() -> None:
    room = Room(prefill=2, decode=2, max_legs_per_replica=1)
    room.epochs.commit(2, "v2")
    room.fleet.confirm("prefill-1", 2)
    room.fleet.confirm("decode-1", 2)
    new = room.granted(1, min_version="v2")
    old = room.granted(2)
    assert (old.epoch, room.ask(3, min_version="v2"), room.ask(4)) == (1, None, None)
    room.end(old)
    assert room.told() == [(4, "prefill-0")]
    room.end(new)
    assert room.told() == [(3, "prefill-1")]


def test_a_newcomer_does_not_overtake_who_waits_for_the_same_room() -> None:
    room = Room(colocated=1, max_legs_per_replica=1)
    running = room.granted(1)
    assert room.ask(2) is None
    room.done(1, running)
    assert room.ask(3) is None
    assert room.told() == [(2, "colocated-0")]


def test_room_in_total_is_kept_for_a_request_until_it_leaves() -> None:
    room = Room(prefill=2, decode=2, max_requests=2)
    one, two = room.granted(1), room.granted(2)
    assert room.ask(3) is None
    room.end(one)
    assert room.told() == []
    second = room.granted(1, handoff_epoch=1)
    room.end(two, "broken")
    again = room.granted(2)
    assert room.told() == []
    room.done(1, second)
    assert [number for number, _ in room.told()] == [3]
    assert room.dispatcher.admitted == 2
    room.done(2, again)
    assert room.dispatcher.admitted == 1


def test_who_gets_room_in_total_can_still_wait_for_a_replica() -> None:
    room = Room(colocated=1, max_requests=2, max_legs_per_replica=1)
    one = room.granted(1)
    assert [room.ask(2), room.ask(3)] == [None, None]
    assert room.dispatcher.admitted == 1
    room.done(1, one)
    assert room.told() == [(2, "colocated-0")]
    assert room.dispatcher.waiting == 1


@pytest.mark.parametrize("longest", [0, 2])
def test_a_line_that_is_full_refuses_newcomers_and_no_running_request(longest: int) -> None:
    room = Room(prefill=1, decode=1, max_waiting=longest)
    running = room.granted(1)
    room.gate.set("frozen")
    assert [room.ask(number) for number in range(10, 10 + longest)] == [None] * longest
    refusal = room.refused(20)
    assert refusal.kind == "line_full"
    assert "frozen" in refusal.message
    assert f"{longest} requests wait already" in refusal.message
    assert room.ask(1, handoff_epoch=running.epoch) is None


@pytest.mark.parametrize(
    ("waits_for", "message"),
    [("gate", "the router's gate is holding"), ("room", "no prefill replica has room"),
     ("total", "1 requests are being served"), ("version", "weight version")],
)  # fmt: skip
def test_a_wait_ends_after_its_time_with_the_reason(waits_for: str, message: str) -> None:
    every: dict[str, dict[str, Any]] = {"total": {"max_requests": 1}, "room": {"max_legs_per_replica": 1}}
    room = Room(prefill=1, decode=1, max_wait_s=60.0, **every.get(waits_for, {}))
    room.granted(1)
    if waits_for == "gate":
        room.gate.set("holding")
    assert room.ask(2, now=10.0, min_version="v9" if waits_for == "version" else None) is None
    room.dispatcher.tick(69.9)
    assert room.told() == []
    room.dispatcher.tick(70.0)
    ((number, answer),) = room.dispatcher.outbox
    assert (number, getattr(answer, "kind", None)) == (2, "waited_too_long")
    assert "waited 60 s in line" in getattr(answer, "message", "")
    assert message in getattr(answer, "message", "")
    assert room.dispatcher.waiting == 0


def test_the_end_of_a_wait_and_room_at_the_same_moment_is_a_grant() -> None:
    room = Room(colocated=1, max_wait_s=60.0)
    room.gate.set("holding")
    assert room.ask(1) is None
    room.gate.set("open")
    room.dispatcher.tick(60.0)
    assert room.told() == [(1, "colocated-0")]


def test_who_waits_while_the_last_replica_goes_is_refused_and_does_not_hang() -> None:
    room = Room(prefill=1, decode=1, max_legs_per_replica=1)
    running = room.granted(1)
    assert room.ask(2) is None
    take_out(room.fleet, "decode-0")
    room.dispatcher.tick(1.0)
    assert room.told() == [(2, "no_replica")]
    assert room.ask(3, now=1.0) is not None
    room.end(running)


def test_a_second_leg_in_line_is_refused_when_its_replicas_go() -> None:
    room = Room(prefill=1, decode=1, max_legs_per_replica=1)
    room.granted(1, handoff_epoch=1)
    assert room.ask(2, handoff_epoch=1) is None
    take_out(room.fleet, "decode-0")
    room.look()
    assert room.told() == [(2, "no_pair")]


def test_a_client_that_leaves_the_line_is_passed_over() -> None:
    room = Room(colocated=1, max_legs_per_replica=1)
    running = room.granted(1)
    assert [room.ask(2), room.ask(3)] == [None, None]
    room.dispatcher.leave(2, 0.0)
    assert room.dispatcher.waiting == 1
    room.done(1, running)
    assert room.told() == [(3, "colocated-0")]


def test_a_replica_on_trial_gets_one_request_of_the_line_and_the_rest_after_it() -> None:
    room = Room(colocated=1)
    fail_to_connect(room.fleet, "colocated-0", 0.0)
    room.gate.set("holding")
    assert [room.ask(number) for number in (1, 2, 3)] == [None] * 3
    room.gate.set("open")
    room.fleet.probe_passed("colocated-0", 1.0)
    room.look(1.0)
    ((_, trial),) = room.dispatcher.outbox
    assert room.told() == [(1, "colocated-0")]
    room.end(trial, "ok", 2.0)  # type: ignore[arg-type]
    assert room.told() == [(2, "colocated-0"), (3, "colocated-0")]


def test_leaving_is_fine_for_who_never_asked() -> None:
    room = Room(colocated=1)
    room.dispatcher.leave(99, 0.0)
    assert is_idle(room.fleet)


def test_a_tick_lets_idle_sessions_go() -> None:
    room = Room(colocated=1, policy={"type": "sticky_least_loaded", "session_idle_s": 10.0})
    room.done(1, room.granted(1, session="s"))
    assert not is_idle(room.fleet)
    room.dispatcher.tick(10.0)
    assert is_idle(room.fleet)
