"""Failed legs: what is tried again, when, where, and whose fault it is."""

from __future__ import annotations

from typing import Any

import pytest

from router.core.commands import Answer, CancelLeg, CountClientGone, CountLeg, CountRetry, Pause, SendLeg, StartRelay
from tests.unit.router.fleets import fail_to_connect, take_out
from tests.unit.router.flows import Driver, error_of, kinds, metrics, pair, status_of

ERROR_EVENT = b'data: {"error": {"code": 500}}\n'


@pytest.mark.parametrize("status", [400, 401, 403, 404, 413, 422, 429])
@pytest.mark.parametrize("legs", [1, 2])
def test_a13_a_4xx_of_either_leg_passes_through(status: int, legs: int) -> None:
    driver = Driver(prefill=1, decode=1, leg_failures=1)
    driver.arrive()
    if legs == 2:
        driver.hand_over()
    ended, answer = driver.answer(b"the engine's words", status=status)
    assert ended.outcome == "client_error"
    assert (answer.reply.status, answer.reply.body) == (status, b"the engine's words")
    assert driver.idle
    assert len(driver.fleet.paired) == 1


@pytest.mark.parametrize("status", [500, 502, 503, 504])
def test_a13_a_5xx_counts_against_its_replica(status: int) -> None:
    driver = pair(leg_failures=1)
    driver.arrive()
    driver.answer(b"{}", status=status)
    assert driver.fleet.usable_count("prefill") == 1


def test_a22_a_failed_decode_leg_is_run_again_from_the_start_elsewhere() -> None:
    driver = pair()
    driver.arrive()
    driver.hand_over()
    commands = driver.answer(b"{}", status=500)
    assert commands[:2] == [CountLeg(role="decode", outcome="engine_error"), CountRetry()]
    (prefill,) = driver.rest(commands)
    assert (prefill.role, prefill.request_id) == ("prefill", "key-2")
    decode = driver.hand_over()[-1]
    assert (decode.replica, decode.request_id) == ("decode-1", "key-2")
    assert status_of(driver.answer(b'{"text": "hi"}')) == 200
    assert driver.idle


def test_the_engines_own_error_is_the_answer_when_nothing_is_left_to_try() -> None:
    driver = pair(retries=0)
    driver.arrive()
    commands = driver.answer(b'{"error": "the engine\'s"}', status=503)
    assert (status_of(commands), commands[-1].reply.body) == (503, b'{"error": "the engine\'s"}')
    assert ("Retry-After", "1") in commands[-1].reply.headers
    plain = pair(retries=0)
    plain.arrive()
    commands = plain.answer(b"oops", status=500, kind="text/plain")
    assert (status_of(commands), error_of(commands)["code"]) == (502, 502)


@pytest.mark.parametrize(("failure", "status"), [("unreachable", 503), ("broken", 502), ("engine_error", 502)])
def test_used_up_attempts_end_in_an_error_that_names_the_replica(failure: str, status: int) -> None:
    driver = pair()
    driver.arrive()
    commands = driver.fail(failure)
    assert kinds(commands) == [CountLeg, CountRetry, Pause]
    assert kinds(driver.rest(commands)) == [SendLeg]
    commands = driver.fail(failure)
    assert status_of(commands) == status
    assert (error_of(commands)["code"], error_of(commands)["param"]) == (status, None)
    assert "prefill-1" in error_of(commands)["message"]
    assert driver.idle


def test_a10_a_request_gets_at_most_one_prefill_leg_more_than_retries() -> None:
    driver = pair(retries=3, leg_failures=100)
    commands, sent = driver.arrive(), 0
    while not isinstance(commands[-1], Answer):
        sent += sum(isinstance(each, SendLeg) for each in commands)
        commands = driver.fail() if driver.flow.state == "prefill" else driver.rest(commands)
    assert sent == 4


def test_a10_abandoned_requests_cost_one_prefill_leg_each() -> None:
    for state in ("prefill", "resting"):
        driver = pair()
        driver.until(state)
        assert not any(isinstance(each, SendLeg) for each in driver.leave())
        assert driver.idle


def test_pauses_before_retries_grow() -> None:
    driver = pair(retries=3, leg_failures=100)
    driver.arrive(now=100.0)
    now = 100.0
    for until in (100.5, 101.5, 103.5):
        assert driver.fail(now=now)[-1] == Pause(until=until)
        driver.time(until)
        now = until


def test_a_pause_ends_with_the_deadline() -> None:
    driver = pair()
    driver.arrive()
    assert driver.fail(now=239.9)[-1] == Pause(until=240.0)
    assert status_of(driver.time(240.0)) == 504
    assert driver.idle


def test_nothing_is_at_an_engine_during_a_pause() -> None:
    driver = pair()
    driver.until("resting")
    assert sum(view.legs_in_flight for view in driver.fleet.views()) == 0
    assert driver.room.dispatcher.admitted == 1


def test_without_budget_nothing_is_retried() -> None:
    driver = pair(budget=1)
    driver.budget.take()
    driver.arrive()
    assert status_of(driver.fail()) == 502
    assert driver.idle


def test_requests_served_fill_the_budget() -> None:
    driver = pair(budget=1)
    driver.budget.take()
    driver.arrive()
    driver.hand_over()
    driver.answer()
    assert driver.budget.left == pytest.approx(0.2)
    streamed = pair(budget=1)
    streamed.budget.take()
    streamed.until("relaying")
    streamed.end_stream()
    assert streamed.budget.left == pytest.approx(0.2)


def test_a17_a_200_that_says_error_is_a_failure() -> None:
    failed = b'{"choices": [{"finish_reason": "error"}]}'
    driver = pair()
    driver.arrive()
    commands = driver.answer(failed)
    assert kinds(commands) == [CountLeg, CountRetry, Pause]
    driver.rest(commands)
    driver.hand_over()
    assert status_of(driver.answer(failed)) == 502


def test_a22_an_error_event_before_anything_else_is_retried() -> None:
    driver = pair()
    driver.arrive()
    driver.hand_over()
    commands = driver.stream(ERROR_EVENT)
    assert kinds(commands) == [CancelLeg, CountLeg, CountRetry, Pause]
    driver.rest(commands)
    driver.hand_over()
    assert kinds(driver.stream()) == [StartRelay]


def test_a_prefill_engine_that_streams_is_a_failed_leg() -> None:
    driver = pair()
    driver.arrive()
    first = driver.sent().replica
    commands = driver.stream(b'data: {"choices": []}\n\n')
    assert kinds(commands) == [CancelLeg, CountLeg, CountRetry, Pause]
    driver.rest(commands)
    assert (driver.sent().role, driver.sent().replica != first) == ("prefill", True)
    assert status_of(driver.stream(b'data: {"choices": []}\n\n')) == 502
    assert driver.idle


def test_no_usable_replica_is_a_503_that_names_the_role() -> None:
    driver = Driver(prefill=1, decode=1)
    driver.arrive()
    take_out(driver.fleet, "decode-0")
    commands = driver.hand_over()
    assert status_of(commands) == 503
    assert "no usable decode replica" in error_of(commands)["message"]
    assert ("Retry-After", "1") in commands[-1].reply.headers
    assert driver.idle


def test_a41_a_leg_that_an_engine_refuses_as_another_life_is_run_elsewhere() -> None:
    driver = pair()
    driver.fleet.recognise("prefill-0", "old", 0.0)
    (leg,) = driver.arrive()
    assert (leg.replica, leg.instance) == ("prefill-0", "old")
    driver.fleet.recognise("prefill-0", "new", 0.0)
    (again,) = driver.rest(driver.answer(b"{}", status=503))
    assert (again.replica, again.instance) == ("prefill-1", "")
    driver.hand_over()
    assert status_of(driver.answer()) == 200
    assert driver.idle


# -- time ----------------------------------------------------------------------------------------------------


def test_one_deadline_covers_all_legs_and_attempts() -> None:
    driver = pair()
    (prefill,) = driver.arrive(now=100.0)
    (retried,) = driver.rest(driver.fail("broken", now=150.0))
    decode = driver.hand_over(now=170.0)[-1]
    assert {each.until for each in (prefill, retried, decode)} == {340.0}
    commands = driver.time(340.0)
    assert kinds(commands) == [CancelLeg, CountLeg, Answer]
    assert status_of(commands) == 504
    assert "no whole answer within 240 s" in error_of(commands)["message"]
    assert driver.idle


@pytest.mark.parametrize("state", ["asking", "asking_second"])
def test_the_deadline_ends_a_wait_in_line(state: str) -> None:
    driver = pair()
    driver.until(state)
    assert status_of(driver.time(240.0)) == 504
    assert driver.idle


def test_no_second_leg_after_the_deadline() -> None:
    driver = pair()
    driver.arrive()
    commands = driver.hand_over(now=240.0, timing=metrics(queue_ms=0.0, first_token_ms=239_000.0))
    assert kinds(commands) == [CountLeg, type(commands[1]), Answer]
    assert commands[1].outcome == "unused"
    assert status_of(commands) == 504
    assert driver.idle


@pytest.mark.parametrize(("sent_at", "blamed"), [(100.0, True), (130.0, False)])
def test_the_deadline_blames_only_who_had_the_request_for_most_of_the_time(sent_at: float, blamed: bool) -> None:
    driver = Driver(prefill=1, decode=1, leg_failures=1)
    driver.arrive()
    driver.answer(b"{}", now=sent_at)
    driver.time(240.0)
    assert driver.fleet.usable_count("decode") == (0 if blamed else 1)


def test_the_deadline_of_a_stream_is_told_inside_it() -> None:
    driver = pair()
    driver.until("relaying")
    commands = driver.time(240.0)
    assert commands[:2] == [CancelLeg(leg=2), CountLeg(role="decode", outcome="timeout")]
    assert error_of(commands)["code"] == 504
    assert driver.idle


def test_a14_a_leg_without_an_answer_is_closed_before_it_is_run_elsewhere() -> None:
    driver = pair(leg_timeout_s=10.0)
    (stuck,) = driver.arrive(now=100.0)
    assert (stuck.until, stuck.deadline) == (110.0, 340.0)
    commands = driver.time(110.0)
    assert commands[:3] == [CancelLeg(leg=1), CountLeg(role="prefill", outcome="timeout"), CountRetry()]
    (again,) = driver.rest(commands)
    assert (again.replica != stuck.replica, again.request_id) == (True, "key-2")
    assert again.until == commands[-1].until + 10.0
    driver.hand_over(now=111.0)
    assert status_of(driver.answer(now=112.0)) == 200
    assert driver.idle


def test_a14_the_time_of_a_leg_ends_no_stream_that_has_begun() -> None:
    driver = pair(leg_timeout_s=10.0)
    driver.until("relaying")
    assert driver.sent().deadline == 240.0
    assert driver.end_stream(now=100.0)[0].outcome == "ok"


def test_a14_two_slow_replicas_end_in_a_504_that_says_so() -> None:
    driver = pair(leg_timeout_s=10.0)
    driver.arrive()
    driver.rest(driver.time(10.0))
    commands = driver.time(30.0)
    assert status_of(commands) == 504
    assert "no answer within 10 s" in error_of(commands)["message"]


def test_a14_an_abort_by_id_ends_the_one_live_copy() -> None:
    driver = pair()
    driver.until("decode")
    commands = driver.interrupt("asked")
    assert commands[:2] == [CancelLeg(leg=2), CountLeg(role="decode", outcome="cancelled")]
    assert status_of(commands) == 499
    assert CountClientGone() not in commands
    assert driver.idle


def test_a_retry_avoids_where_it_failed_unless_nothing_else_is_left() -> None:
    driver = pair(leg_failures=100)
    first = driver.arrive()[0].replica
    (again,) = driver.rest(driver.fail())
    assert again.replica != first
    alone = Driver(prefill=1, decode=1, leg_failures=100)
    first = alone.arrive()[0].replica
    assert alone.rest(alone.fail())[0].replica == first


def test_a_replica_lost_meanwhile_is_not_tried() -> None:
    driver = pair()
    driver.until("resting")
    fail_to_connect(driver.fleet, "prefill-1")
    leg: Any = driver.time(1.0)[0]
    assert leg.replica == "prefill-0"
