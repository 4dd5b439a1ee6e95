"""Which replica a leg gets: roles, epochs, versions, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest

from router.core.asks import Grant
from tests.unit.router.dispatchers import Room
from tests.unit.router.fleets import is_idle, make_fleet, take_out


def test_a_pair_of_legs_is_granted_and_given_back() -> None:
    room = Room(prefill=1, decode=1)
    first = room.granted(1, tokens=7)
    assert (first.role, first.replica, first.url, first.epoch, first.version, first.reason) == (
        "prefill", "prefill-0", "http://prefill-0", 1, "v1", "new",
    )  # fmt: skip
    room.end(first)
    second = room.granted(1, handoff_epoch=first.epoch)
    assert (second.role, second.replica, second.epoch) == ("decode", "decode-0", 1)
    assert second.ticket != first.ticket
    assert room.dispatcher.admitted == 1
    room.done(1, second)
    assert (room.dispatcher.admitted, is_idle(room.fleet)) == (0, True)


def test_a_grant_names_the_life_that_it_is_for() -> None:
    room = Room(colocated=1)
    room.fleet.recognise("colocated-0", "life-1", 0.0)
    assert room.granted(1).instance == "life-1"


def test_colocated_replicas_serve_alone_and_only_where_no_pair_can() -> None:
    alone = Room(colocated=1)
    assert alone.granted(1).role == "colocated"
    mixed = Room(prefill=1, decode=1, colocated=1)
    assert mixed.granted(1).role == "prefill"
    take_out(mixed.fleet, "decode-0")
    assert mixed.granted(2).role == "colocated"
    take_out(mixed.fleet, "colocated-0")
    refusal = mixed.refused(3)
    assert (refusal.kind, refusal.message) == ("no_replica", "no usable decode replica")


@pytest.mark.parametrize(
    ("shape", "out", "message"),
    [
        ({"prefill": 1, "decode": 1}, "prefill-0", "no usable prefill replica"),
        ({"prefill": 1, "decode": 1}, "decode-0", "no usable decode replica"),
        ({"colocated": 1}, "colocated-0", "no usable colocated replica"),
        ({"prefill": 1, "decode": 1, "colocated": 1}, "all", "no usable prefill replica"),
    ],
)
def test_a_refusal_names_the_role_that_is_missing(shape: dict[str, int], out: str, message: str) -> None:
    room = Room(make_fleet(**shape))
    for name in room.fleet.members:
        if out in (name, "all"):
            take_out(room.fleet, name)
    refusal = room.refused(1)
    assert (refusal.kind, refusal.message) == ("no_replica", message)
    assert room.dispatcher.not_ready_reason() == message


def test_an_empty_router_refuses_too() -> None:
    assert Room().refused(1).kind == "no_replica"


def test_readiness_names_the_reason() -> None:
    room = Room(prefill=1, decode=1)
    room.gate.set("frozen")
    assert "frozen" in str(room.dispatcher.not_ready_reason())
    room.gate.set("open")
    assert room.dispatcher.not_ready_reason() is None
    room.fleet.confirm("decode-0", 2)
    assert "no epoch has both" in str(room.dispatcher.not_ready_reason())
    assert Room(colocated=1).dispatcher.not_ready_reason() is None


# -- several epochs ------------------------------------------------------------------------------------------


def two_epochs(**settings: Any) -> Room:
    """Two pairs, one in each epoch; versions v1 and v2."""
    room = Room(prefill=2, decode=2, **settings)
    room.epochs.commit(2, "v2")
    for name in ("prefill-1", "decode-1"):
        room.fleet.confirm(name, 2)
    return room


def test_pairs_are_made_within_one_epoch() -> None:
    room = two_epochs()
    seen = set()
    for number in range(6):
        first = room.granted(number)
        second = room.granted(number, handoff_epoch=first.epoch)
        assert first.replica[-1] == second.replica[-1]
        assert (first.epoch, first.version) == (second.epoch, second.version)
        seen.add(first.epoch)
    assert seen == {1, 2}


def test_an_epoch_without_a_pair_is_not_used() -> None:
    room = two_epochs()
    take_out(room.fleet, "decode-1")
    assert {room.granted(number).epoch for number in range(4)} == {1}


def test_a_handoff_whose_epoch_has_no_decode_replica_any_more_is_refused() -> None:
    room = two_epochs()
    first = room.granted(1)
    take_out(room.fleet, f"decode-{first.replica[-1]}")
    refusal = room.refused(1, handoff_epoch=first.epoch)
    assert refusal.kind == "no_pair"
    assert f"epoch {first.epoch}" in refusal.message


def test_a_session_pinned_to_another_epoch_gets_a_decode_replica_of_the_handoffs() -> None:
    room = two_epochs()
    first = room.granted(1, session="s")
    room.granted(1, handoff_epoch=first.epoch)
    other = 3 - first.epoch
    assert room.granted(1, handoff_epoch=other).epoch == other


def test_a_minimum_version_is_one_committed_at_or_after_it() -> None:
    room = two_epochs()
    assert {room.granted(number, min_version="v2").epoch for number in range(3)} == {2}
    assert {room.granted(number, min_version="v1").epoch for number in range(10, 14)} == {1, 2}
    colocated = Room(colocated=1)
    assert colocated.granted(1, min_version="v1").epoch == 1


def test_a_version_that_came_back_counts_from_its_first_epoch() -> None:
    room = two_epochs()
    room.epochs.commit(3, "v1")
    assert {room.granted(number, min_version="v1").epoch for number in range(4)} == {1, 2}


def test_a_minimum_version_that_nobody_serves_is_waited_for() -> None:
    room = two_epochs()
    assert room.ask(1, min_version="v3") is None
    room.epochs.commit(3, "v3")
    room.look()
    assert room.told() == []
    room.fleet.confirm("prefill-0", 3)
    room.look()
    assert room.told() == []
    room.fleet.confirm("decode-0", 3)
    room.look()
    assert room.told() == [(1, "prefill-0")]


def test_with_no_replica_at_all_a_minimum_version_is_refused_like_all() -> None:
    room = Room(prefill=1, decode=1)
    take_out(room.fleet, "prefill-0")
    assert room.refused(1, min_version="v1").kind == "no_replica"


# -- without a prefill leg -----------------------------------------------------------------------------------


def one_turn(room: Room, number: int, tokens: int) -> list[Grant]:
    """A request of the session, as far as it is served; its grants."""
    grants = [room.granted(number, session="s", tokens=tokens)]
    if grants[0].role == "prefill":
        room.end(grants[0])
        grants.append(room.granted(number, session="s", tokens=tokens, handoff_epoch=grants[0].epoch))
    room.done(number, grants[-1])
    return grants


def test_a_short_follow_up_goes_straight_to_the_decode_replica_that_has_the_rest() -> None:
    room = Room(prefill=2, decode=2, skip_prefill_below_tokens=10)
    _, decode = one_turn(room, 1, tokens=100)
    (follow_up,) = one_turn(room, 2, tokens=109)
    assert (follow_up.role, follow_up.replica, follow_up.reason) == ("decode", decode.replica, "pinned")
    assert [each.role for each in one_turn(room, 3, tokens=119)] == ["prefill", "decode"]
    assert [each.role for each in one_turn(room, 4, tokens=50)] == ["prefill", "decode"]


def test_it_is_off_by_default() -> None:
    room = Room(prefill=1, decode=1)
    one_turn(room, 1, tokens=100)
    assert [each.role for each in one_turn(room, 2, tokens=100)] == ["prefill", "decode"]


@pytest.mark.parametrize("change", ["new weights", "lost", "failed there", "no pair in its epoch", "version"])
def test_a_prefill_leg_is_run_where_the_decode_replica_can_not_be_relied_on(change: str) -> None:
    room = Room(prefill=3, decode=3, skip_prefill_below_tokens=10)
    _, decode = one_turn(room, 1, tokens=100)
    asked: dict[str, Any] = {}
    if change == "new weights":
        for name in room.fleet.members:
            room.fleet.confirm(name, 2)
    elif change == "lost":
        take_out(room.fleet, decode.replica)
    elif change == "failed there":
        asked["avoid"] = frozenset({decode.replica})
    else:
        room.epochs.commit(2, "v2")
        others = [name for name in room.fleet.members if name[-1] != decode.replica[-1]]
        for name in others:
            room.fleet.confirm(name, 2)
        if change == "version":
            asked["min_version"] = "v2"
        else:
            take_out(room.fleet, f"prefill-{decode.replica[-1]}")
    assert room.granted(2, session="s", tokens=101, **asked).role == "prefill"
