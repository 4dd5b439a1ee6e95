from __future__ import annotations

from router.core.sessions import Pin, Session, Sessions


def begun(sessions: Sessions, name: str | None, replica: str = "d0") -> Session:
    session = sessions.begin_request(name)
    sessions.pin(session, "decode", replica)
    return session


def test_a_request_without_an_id_is_a_session_of_its_own() -> None:
    sessions = Sessions(10.0)
    one, two = begun(sessions, None), begun(sessions, None, "d1")
    assert one is not two
    assert sessions.end_request(one, 0.0) == [Pin("decode", "d0")]
    assert sessions.end_request(two, 0.0) == [Pin("decode", "d1")]
    assert len(sessions) == 0


def test_a_named_session_keeps_its_pins_until_it_is_finished() -> None:
    sessions = Sessions(10.0)
    session = begun(sessions, "s")
    sessions.pin(session, "prefill", "p0")
    assert sessions.end_request(session, 0.0) == []
    assert sessions.begin_request("s").pins == {"decode": "d0", "prefill": "p0"}
    assert sessions.end_request(session, 1.0) == []
    assert set(sessions.finish("s")) == {Pin("decode", "d0"), Pin("prefill", "p0")}
    assert sessions.finish("s") == sessions.finish("unknown") == []


def test_finishing_during_a_request_waits_for_its_end() -> None:
    sessions = Sessions(10.0)
    session = begun(sessions, "s")
    assert sessions.finish("s") == []
    assert sessions.end_request(session, 0.0) == [Pin("decode", "d0")]


def test_a_request_after_finish_keeps_the_session_alive() -> None:
    sessions = Sessions(10.0)
    session = begun(sessions, "s")
    sessions.finish("s")
    assert sessions.begin_request("s") is session
    assert sessions.end_request(session, 0.0) == []
    assert sessions.end_request(session, 0.0) == []
    assert len(sessions) == 1


def test_a12_idle_sessions_expire_in_their_order_and_open_ones_do_not() -> None:
    sessions = Sessions(10.0)
    first, second, busy = begun(sessions, "1", "a"), begun(sessions, "2", "b"), begun(sessions, "busy", "c")
    sessions.end_request(first, 0.0)
    sessions.end_request(second, 5.0)
    assert sessions.expire(9.9) == []
    assert sessions.expire(10.0) == [Pin("decode", "a")]
    sessions.begin_request("2")
    assert sessions.expire(1000.0) == []
    sessions.end_request(busy, 1000.0)
    assert sessions.expire(1010.0) == [Pin("decode", "c")]


def test_losing_a_replica_ends_its_pins_once() -> None:
    sessions = Sessions(10.0)
    here, there = begun(sessions, "here", "d0"), begun(sessions, "there", "d1")
    sessions.pin(here, "prefill", "p0")
    assert sessions.lose_replica("d0") == [Pin("decode", "d0")]
    assert sessions.lose_replica("d0") == []
    assert (here.pins, there.pins) == ({"prefill": "p0"}, {"decode": "d1"})
    assert sessions.pin(here, "decode", "d1") is None
    assert sessions.pin(here, "decode", "d2") == Pin("decode", "d1")
    assert sessions.lose_replica("d1") == [Pin("decode", "d1")]


def test_without_an_idle_time_no_session_outlives_its_requests() -> None:
    sessions = Sessions(None)
    session = begun(sessions, "s")
    assert sessions.expire(1e9) == []
    assert sessions.end_request(session, 0.0) == [Pin("decode", "d0")]
    assert len(sessions) == 0


def test_a_session_that_moves_leaves_nothing_behind() -> None:
    sessions = Sessions(None)
    for number in range(100):
        session = begun(sessions, "s", f"d{number % 3}")
        sessions.pin(session, "decode", f"d{(number + 1) % 3}")
        sessions.end_request(session, 0.0)
    assert not any(sessions._on_replica.values())
    assert not sessions._idle_since
