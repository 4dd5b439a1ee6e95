from __future__ import annotations

import pytest

from router.core.records import PinRecord, SessionRecord
from router.core.sessions import Session, Sessions
from router.core.table import Member
from router.settings import EngineRole
from tests.unit.router.fleets import make_member

P0 = make_member("p0", role="prefill", instance="p0's")
D0, D1, D2 = (make_member(f"d{number}", instance=f"d{number}'s") for number in range(3))


def begun(sessions: Sessions, name: str | None, member: Member = D0) -> Session:
    session = sessions.begin_request(name)
    sessions.pin(session, member.role, member)
    return session


def test_a_request_without_an_id_is_a_session_of_its_own() -> None:
    sessions = Sessions(10.0, followed=True)
    one, two = begun(sessions, None), begun(sessions, None, D1)
    assert one is not two
    assert sessions.end_request(one, 0.0) == [D0]
    assert sessions.end_request(two, 0.0) == [D1]
    assert len(sessions) == 0


def test_a_named_session_keeps_its_pins_until_it_is_finished() -> None:
    sessions = Sessions(10.0, followed=True)
    session = begun(sessions, "s")
    sessions.pin(session, "prefill", P0)
    assert sessions.end_request(session, 0.0) == []
    assert sessions.begin_request("s").pins() == [P0, D0]
    assert sessions.end_request(session, 1.0) == []
    assert sessions.finish("s") == [P0, D0]
    assert sessions.finish("s") == sessions.finish("unknown") == []


def test_finishing_during_a_request_waits_for_its_end() -> None:
    sessions = Sessions(10.0, followed=True)
    session = begun(sessions, "s")
    assert sessions.finish("s") == []
    assert sessions.end_request(session, 0.0) == [D0]


def test_a_request_after_finish_keeps_the_session_alive() -> None:
    sessions = Sessions(10.0, followed=True)
    session = begun(sessions, "s")
    sessions.finish("s")
    assert sessions.begin_request("s") is session
    assert sessions.end_request(session, 0.0) == []
    assert sessions.end_request(session, 0.0) == []
    assert len(sessions) == 1


def test_a_request_after_the_end_begins_the_session_anew() -> None:
    sessions = Sessions(10.0, followed=True)
    first = begun(sessions, "s")
    sessions.end_request(first, 0.0)
    sessions.finish("s")
    again = sessions.begin_request("s")
    assert again is not first
    assert again.pins() == []


def test_more_ends_than_beginnings_are_a_mistake_of_ours() -> None:
    sessions = Sessions(10.0, followed=True)
    session = begun(sessions, "s")
    sessions.end_request(session, 0.0)
    with pytest.raises(AssertionError, match="session s ended more requests than it began"):
        sessions.end_request(session, 0.0)


def test_a12_idle_sessions_expire_in_their_order_and_open_ones_do_not() -> None:
    sessions = Sessions(10.0, followed=True)
    first, second, busy = begun(sessions, "1", D0), begun(sessions, "2", D1), begun(sessions, "busy", D2)
    sessions.end_request(first, 0.0)
    sessions.end_request(second, 5.0)
    assert sessions.expire(9.9) == []
    assert sessions.expire(10.0) == [D0]
    sessions.begin_request("2")
    assert sessions.expire(1000.0) == []
    sessions.end_request(busy, 1000.0)
    assert sessions.expire(1010.0) == [D2]


def test_losing_a_replica_ends_its_pins_once() -> None:
    sessions = Sessions(10.0, followed=True)
    here, there = begun(sessions, "here", D0), begun(sessions, "there", D1)
    sessions.pin(here, "prefill", P0)
    assert [sessions.lose(D0), sessions.lose(D0)] == [1, 0]
    assert (here.pins(), there.pins()) == ([P0], [D1])
    assert (here.lost, there.lost) == (True, False)
    assert sessions.pin(here, "decode", D1) is None
    assert not here.lost
    assert sessions.pin(here, "decode", D2) is D1
    assert sessions.lose(D1) == 1


def test_without_an_idle_time_no_session_outlives_its_requests() -> None:
    sessions = Sessions(None, followed=True)
    session = begun(sessions, "s")
    assert sessions.expire(1e9) == []
    assert sessions.end_request(session, 0.0) == [D0]
    assert len(sessions) == 0


def test_a_session_that_moves_leaves_nothing_behind() -> None:
    sessions = Sessions(None, followed=True)
    for number in range(100):
        session = begun(sessions, "s", (D0, D1, D2)[number % 3])
        sessions.pin(session, "decode", (D0, D1, D2)[(number + 1) % 3])
        sessions.end_request(session, 0.0)
    assert not any(sessions._on_member.values())
    assert not sessions._idle_since


# -- what outlives the router --------------------------------------------------------------------------------


def changes(sessions: Sessions) -> dict[str, dict[EngineRole, PinRecord]]:
    return {record.id: record.pins for record in sessions.take_changes()}


def test_each_change_of_a_named_sessions_pins_is_recorded_once() -> None:
    sessions = Sessions(10.0, followed=True)
    session = begun(sessions, "s")
    begun(sessions, None)
    assert changes(sessions) == {"s": {"decode": PinRecord("d0", "d0's")}}
    assert changes(sessions) == {}
    sessions.pin(session, "prefill", P0)
    sessions.pin(session, "decode", D1)
    assert changes(sessions) == {"s": {"prefill": PinRecord("p0", "p0's"), "decode": PinRecord("d1", "d1's")}}
    sessions.lose(D1)
    assert changes(sessions) == {"s": {"prefill": PinRecord("p0", "p0's")}}
    sessions.end_request(session, 0.0)
    assert changes(sessions) == {}
    sessions.finish("s")
    assert changes(sessions) == {"s": {}}


def test_an_expired_session_is_recorded_as_over() -> None:
    sessions = Sessions(10.0, followed=True)
    sessions.end_request(begun(sessions, "s"), 0.0)
    sessions.take_changes()
    sessions.expire(10.0)
    assert sessions.take_changes() == [SessionRecord("s", {})]


def test_all_records_are_those_with_pins() -> None:
    sessions = Sessions(10.0, followed=True)
    begun(sessions, "s").known_tokens = 70
    sessions.begin_request("nowhere yet")
    assert sessions.all_records() == [SessionRecord("s", {"decode": PinRecord("d0", "d0's")}, 70)]


def test_a_restored_session_is_pinned_role_by_role_and_idle_from_then_on() -> None:
    sessions = Sessions(10.0, followed=True)
    assert sessions.restore("s", 70, D0, 100.0)
    assert sessions.restore("s", 70, P0, 105.0)
    assert sessions.expire(109.9) == []
    session = sessions.begin_request("s")
    assert (session.pins(), session.known_tokens) == ([P0, D0], 70)
    sessions.end_request(session, 110.0)
    assert sessions.expire(120.0) == [P0, D0]


def test_a_pin_that_the_session_has_by_now_is_not_restored_over() -> None:
    sessions = Sessions(10.0, followed=True)
    session = begun(sessions, "s", D1)
    assert not sessions.restore("s", 70, D0, 0.0)
    assert sessions.restore("s", 70, P0, 0.0)
    assert (session.pins(), session.open_requests) == ([P0, D1], 1)
    assert sessions.expire(1000.0) == []


def test_where_sessions_do_not_outlive_their_requests_none_is_restored() -> None:
    sessions = Sessions(None, followed=True)
    assert not sessions.restore("s", 70, D0, 0.0)
    assert len(sessions) == 0
