"""A request while the gate moves: what is held, what is parked (field case A27), what an update does to it."""

from __future__ import annotations

import json
from typing import Any

import pytest

from router.core.commands import (
    Answer,
    CancelLeg,
    CountClientGone,
    CountHandoff,
    CountLeg,
    CountReadmitted,
    CountRetry,
    EndRelay,
    ParkLeg,
    Pause,
    SendLeg,
)
from router.core.gate import GateState
from tests.unit.router.flows import Driver, error_of, kinds, pair, status_of

AT_ENGINES = ["prefill", "decode", "relaying"]
IN_LINE = ["asking", "asking_second", "resting"]
CLOSING = (CancelLeg,)


def test_the_gate_holds_new_requests_fresh_attempts_and_when_frozen_second_legs() -> None:
    new = pair()
    new.gate.set("holding")
    assert (new.arrive(), new.flow.state) == ([], "asking")
    between = pair()
    between.arrive()
    between.gate.set("holding")
    assert kinds(between.hand_over()) == [CountLeg, CountHandoff, SendLeg]
    assert (between.rest(between.fail()), between.flow.state) == ([], "asking")
    frozen = pair()
    frozen.arrive()
    frozen.gate.set("frozen")
    assert kinds(frozen.hand_over()) == [CountLeg]
    assert frozen.flow.state == "asking_second"
    for driver in (new, between, frozen):
        driver.open()
        while driver.flow.state != "done":
            driver.hand_over()
        assert driver.idle


@pytest.mark.parametrize(("state", "gate"), [("asking", "holding"), ("asking", "frozen"), ("asking_second", "frozen")])
def test_a_gate_that_closes_while_the_answer_is_on_its_way_still_holds(state: str, gate: GateState) -> None:
    driver = pair()
    driver.until(state)
    driver.gate.set("open")
    driver.room.look()
    driver.gate.set(gate)
    assert driver.deliver() == []
    assert (driver.flow.state, driver.room.dispatcher.waiting) == (state, 1)
    assert sum(view.legs_in_flight for view in driver.fleet.views()) == 0
    assert kinds(driver.open())[-1] is SendLeg


# -- nothing is closed while frozen --------------------------------------------------------------------------


def frozen_in(state: str) -> Driver:
    driver = pair(leg_timeout_s=10.0)
    driver.until(state)
    driver.gate.set("frozen")
    return driver


def parked_by_client(state: str) -> Driver:
    driver = frozen_in(state)
    commands = driver.leave()
    assert commands == [CountClientGone(), ParkLeg(leg=driver.sent().leg)]
    assert driver.flow.state == "parked"
    return driver


@pytest.mark.parametrize("state", AT_ENGINES)
def test_a27_a_client_that_leaves_closes_its_leg_only_after_the_freeze(state: str) -> None:
    driver = parked_by_client(state)
    assert driver.leave() == []
    assert driver.room.dispatcher.admitted == 1
    driver.gate.set("holding")
    role = driver.sent().role
    assert driver.thaw() == [CancelLeg(leg=driver.sent().leg), CountLeg(role=role, outcome="cancelled")]
    assert driver.idle


@pytest.mark.parametrize("state", AT_ENGINES)
@pytest.mark.parametrize("end", ["answer", "fail", "end_stream", "expire"])
def test_a27_a_parked_leg_that_ends_by_itself_is_over(state: str, end: str) -> None:
    driver = parked_by_client(state)
    assert getattr(driver, end)() == [CountLeg(role=driver.sent().role, outcome="cancelled")]
    assert driver.flow.state == "done"
    assert driver.idle


def test_a27_a_parked_legs_end_blames_nobody() -> None:
    driver = pair(leg_failures=1)
    driver.until("decode")
    driver.gate.set("frozen")
    driver.leave()
    driver.fail("broken")
    assert driver.fleet.usable_count("decode") == 2


@pytest.mark.parametrize("state", ["prefill", "decode"])
def test_a27_an_abort_by_id_is_answered_at_once_and_closes_later(state: str) -> None:
    driver = frozen_in(state)
    commands = driver.interrupt("asked")
    assert kinds(commands) == [ParkLeg, Answer]
    assert status_of(commands) == 499
    assert driver.thaw()[0] == CancelLeg(leg=driver.sent().leg)
    assert driver.idle


@pytest.mark.parametrize("state", AT_ENGINES)
def test_a27_the_deadline_is_told_and_closes_later(state: str) -> None:
    driver = frozen_in(state)
    commands = driver.time(240.0)
    assert kinds(commands) == [ParkLeg, EndRelay if state == "relaying" else Answer]
    assert error_of(commands)["code"] == 504
    driver.thaw(241.0)
    assert driver.idle


@pytest.mark.parametrize("state", ["prefill", "decode"])
def test_a27_the_time_of_a_leg_does_not_end_it_while_frozen(state: str) -> None:
    driver = frozen_in(state)
    assert driver.time(10.0) == [Pause(until=10.5)]
    driver.gate.set("open")
    if state == "prefill":
        driver.hand_over(now=20.0)
    assert status_of(driver.answer(now=21.0)) == 200
    assert driver.idle


@pytest.mark.parametrize("state", ["prefill", "decode"])
def test_a27_an_engine_that_streams_an_error_while_frozen_is_left_alone(state: str) -> None:
    driver = frozen_in(state)
    commands = driver.stream(b'data: {"error": {"code": 500}}\n')
    assert kinds(commands) == [ParkLeg, Answer]
    assert status_of(commands) == 502
    driver.thaw()
    assert driver.idle


@pytest.mark.parametrize("state", IN_LINE)
def test_a27_who_is_at_no_engine_leaves_at_once(state: str) -> None:
    driver = frozen_in(state)
    assert CountClientGone() in driver.leave()
    assert driver.idle


def test_a27_a_reply_that_comes_while_frozen_is_given_to_the_client() -> None:
    driver = frozen_in("decode")
    assert status_of(driver.answer(b'{"text": "hi"}')) == 200
    stream = frozen_in("relaying")
    assert kinds(stream.end_stream()) == [CountLeg, EndRelay]
    assert driver.idle
    assert stream.idle


def test_a27_a_leg_that_fails_while_frozen_is_tried_again_after_it() -> None:
    driver = frozen_in("prefill")
    commands = driver.fail("broken")
    assert not {type(each) for each in commands} & set(CLOSING)
    assert driver.rest(commands) == []
    assert kinds(driver.open(1.0)) == [SendLeg]


def test_a39_a_decode_leg_whose_handoff_expired_while_frozen_waits_for_a_fresh_pair() -> None:
    driver = frozen_in("decode")
    assert driver.expire(28.1) == [
        CountLeg(role="decode", outcome="expired"), CountHandoff(outcome="expired"), CountRetry(),
    ]  # fmt: skip
    assert driver.flow.state == "asking"
    assert driver.open(30.0)[-1].role == "prefill"


# -- updates -------------------------------------------------------------------------------------------------


def held_in(state: str, **settings: Any) -> Driver:
    driver = pair(**settings)
    driver.until(state)
    if state != "asking_second":
        driver.gate.set("holding")
    return driver


@pytest.mark.parametrize("how", ["abort", "readmit", "keep"])
@pytest.mark.parametrize("state", ["asking", "resting"])
def test_an_update_leaves_alone_who_is_in_line(state: str, how: str) -> None:
    driver = held_in(state)
    assert driver.interrupt(how) == []
    assert driver.flow.state == state


@pytest.mark.parametrize("state", AT_ENGINES)
def test_keep_lets_running_requests_run(state: str) -> None:
    assert held_in(state).interrupt("keep") == []


@pytest.mark.parametrize("state", [*AT_ENGINES, "asking_second"])
def test_whoever_has_had_a_leg_is_labelled_as_kept(state: str) -> None:
    """Between the legs too: while the gate is holding, the second one may still run into the update."""
    driver = held_in(state)
    driver.interrupt("keep")
    assert json.loads(driver.flow.legs.making.label())["single_version"] is False


@pytest.mark.parametrize("state", AT_ENGINES)
def test_abort_ends_running_requests_with_an_error_that_says_why(state: str) -> None:
    driver = held_in(state)
    commands = driver.interrupt("abort")
    assert commands[0] == CancelLeg(leg=driver.sent().leg)
    assert error_of(commands)["code"] == 503
    assert "new weights" in error_of(commands)["message"]
    if state != "relaying":
        assert ("Retry-After", "1") in commands[-1].reply.headers
    assert driver.idle


@pytest.mark.parametrize("state", ["prefill", "decode"])
def test_readmit_puts_running_requests_back_and_runs_them_under_the_next_weights(state: str) -> None:
    driver = held_in(state)
    role = driver.sent().role
    assert driver.interrupt("readmit") == [
        CancelLeg(leg=driver.sent().leg), CountLeg(role=role, outcome="cancelled"), CountReadmitted(),
    ]  # fmt: skip
    assert (driver.flow.state, driver.room.dispatcher.waiting) == ("asking", 1)
    driver.gate.set("frozen")
    driver.room.epochs.commit(2, "v2")
    for name in driver.fleet.members:
        driver.fleet.confirm(name, 2)
    (prefill,) = driver.open()
    assert (prefill.role, prefill.epoch, prefill.request_id) == ("prefill", 2, "key-2")
    driver.hand_over()
    headers = dict(driver.answer()[-1].reply.headers)
    assert headers["x-headrace-weight-version"] == "v2"
    assert driver.idle


def test_updates_take_no_attempt_away() -> None:
    driver = held_in("decode", retries=1)
    for _ in range(5):
        driver.gate.set("holding")
        assert CountReadmitted() in driver.interrupt("readmit")
        driver.open()
    assert kinds(driver.fail()) == [CountLeg, CountRetry, Pause]


def test_readmit_ends_a_stream_that_has_begun_inside_it() -> None:
    driver = held_in("relaying")
    commands = driver.interrupt("readmit")
    assert kinds(commands) == [CancelLeg, CountLeg, EndRelay]
    assert error_of(commands)["code"] == 503
    assert driver.idle


@pytest.mark.parametrize("state", ["asking", "prefill", "asking_second", "decode", "relaying", "resting"])
def test_a14_an_abort_by_id_ends_a_request_in_any_state(state: str) -> None:
    driver = held_in(state)
    driver.gate.set("holding")
    commands = driver.interrupt("asked")
    assert error_of(commands)["code"] == 499
    assert (CancelLeg in kinds(commands)) is (state in AT_ENGINES)
    assert driver.flow.state == "done"
    assert driver.idle


@pytest.mark.parametrize("state", ["asking", "prefill", "asking_second", "decode", "relaying", "resting"])
def test_a_router_that_ends_asks_the_clients_of_all_requests_to_come_again(state: str) -> None:
    driver = held_in(state)
    driver.gate.set("frozen")
    commands = driver.interrupt("shutdown")
    assert error_of(commands)["code"] == 503
    assert CancelLeg not in kinds(commands), "what runs on a paused engine ends with the process"
    driver.gate.set("open")
    assert driver.flow.state == ("parked" if state in AT_ENGINES else "done")


@pytest.mark.parametrize("state", ["parked", "done"])
@pytest.mark.parametrize("how", ["abort", "readmit", "keep", "asked", "shutdown"])
def test_what_is_over_for_the_client_is_not_interrupted(state: str, how: str) -> None:
    driver = pair()
    driver.until(state)
    assert driver.interrupt(how) == []
    assert driver.flow.state == state
