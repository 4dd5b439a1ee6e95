from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from router.core.commands import (
    Answer,
    CancelLeg,
    CountClientGone,
    CountHandoff,
    CountLeg,
    CountRetry,
    EndRelay,
    SendLeg,
    StartRelay,
)
from router.core.errors import InvalidTransition
from router.core.events import Arrived, ClientGone, HandoffExpired, LegAnswered, LegFailed, LegStreaming, StreamEnded
from router.core.fleet import Fleet
from router.core.flow import Flow, FlowRules
from router.core.gate import Gate

if TYPE_CHECKING:
    from tests.unit.router.conftest import FleetMaker

HANDOFF = b'{"remote_block_ids":[[1]]}'
JSON = "application/json"


class Driver:
    """A flow and what it said last."""

    def __init__(self, fleet: Fleet, retries: int = 1) -> None:
        self.fleet = fleet
        self.gate = Gate()
        self.gate.set("open")
        rules = FlowRules(
            retries=retries, request_timeout_s=240.0, handoff_lifetime_s=28.0, session_fields=("session_id",)
        )
        self.flow = Flow(fleet=fleet, gate=self.gate, rules=rules)
        self.leg: SendLeg | None = None

    def step(self, event: Any, now: float = 0.0) -> list[Any]:
        commands = self.flow.step(event, now)
        self.leg = next((each for each in commands if isinstance(each, SendLeg)), self.leg)
        return commands

    def arrive(self, body: bytes = b'{"prompt": "hello"}', now: float = 0.0) -> list[Any]:
        return self.step(Arrived(path="/v1/completions", body=body, session_header=None, request_key="key"), now)

    def answer(self, body: bytes = b"{}", status: int = 200, now: float = 0.0) -> list[Any]:
        assert self.leg is not None
        return self.step(LegAnswered(leg=self.leg.leg, status=status, body=body, content_type=JSON), now)

    def hand_over(self, now: float = 0.0) -> list[Any]:
        return self.answer(b'{"kv_transfer_params": ' + HANDOFF + b"}", now=now)

    def fail(self, failure: Any = "broken", now: float = 0.0) -> list[Any]:
        assert self.leg is not None
        return self.step(LegFailed(leg=self.leg.leg, failure=failure, detail="gone"), now)

    def idle(self) -> bool:
        return all(view.legs_in_flight == view.active_sessions == 0 for view in self.fleet.views())


@pytest.fixture
def pair(make_fleet: FleetMaker) -> Driver:
    return Driver(make_fleet(prefill=2, decode=2))


def kinds(commands: list[Any]) -> list[type]:
    return [type(each) for each in commands]


def status_of(commands: list[Any]) -> int:
    assert isinstance(commands[-1], Answer)
    return commands[-1].reply.status


def test_the_two_legs_of_a_request(pair: Driver) -> None:
    (prefill,) = pair.arrive()
    assert (prefill.role, prefill.url, prefill.request_id) == ("prefill", "http://prefill-0/v1/completions", "key-1")
    ended, counted, decode = pair.hand_over()
    assert (ended, counted) == (CountLeg(role="prefill", outcome="ok"), CountHandoff(outcome="sent"))
    assert (decode.role, decode.replica, decode.request_id) == ("decode", "decode-0", "key-1")
    assert json.loads(decode.body) == {"prompt": "hello", "kv_transfer_params": json.loads(HANDOFF)}
    ended, answer = pair.answer(b'{"text": "hi"}')
    assert (answer.reply.status, answer.reply.body) == (200, b'{"text": "hi"}')
    assert set(answer.reply.headers) == {("x-headrace-prefill", "prefill-0"), ("x-headrace-decode", "decode-0")}
    assert pair.idle()


def test_a02_without_a_handoff_decode_goes_out_at_once(pair: Driver) -> None:
    pair.arrive()
    ended, counted, decode = pair.answer(b"{}")
    assert counted == CountHandoff(outcome="missing")
    assert json.loads(decode.body) == {"prompt": "hello"}


@pytest.mark.parametrize(("age", "sent"), [(28.0, True), (28.1, False)])
def test_a39_the_age_counts_from_the_sending_of_the_prefill_leg(pair: Driver, age: float, sent: bool) -> None:
    pair.arrive(now=100.0)
    commands = pair.hand_over(now=100.0 + age)
    if sent:
        assert kinds(commands) == [CountLeg, CountHandoff, SendLeg]
        return
    assert commands[1:3] == [CountHandoff(outcome="expired"), CountRetry()]
    assert (commands[3].role, commands[3].request_id) == ("prefill", "key-2")
    commands = pair.hand_over(now=200.0)
    assert commands[1] == CountHandoff(outcome="expired")
    assert json.loads(commands[2].body) == {"prompt": "hello"}


@pytest.mark.parametrize(("passed_s", "sent"), [(68.0, True), (68.1, False)])
def test_a39_time_that_the_engine_reports_does_not_age_the_handoff(pair: Driver, passed_s: float, sent: bool) -> None:
    pair.arrive(now=0.0)
    metrics = b'{"queue_time_ms": 30000.0, "time_to_first_token_ms": 10000.0, "generation_time_ms": 0.0}'
    commands = pair.answer(b'{"metrics": ' + metrics + b', "kv_transfer_params": ' + HANDOFF + b"}", now=passed_s)
    assert (CountHandoff(outcome="sent") in commands) is sent
    assert (CountHandoff(outcome="expired") in commands) is not sent


def test_a39_the_decode_leg_carries_the_moment_until_which_its_handoff_may_be_sent(pair: Driver) -> None:
    (prefill,) = pair.arrive(now=100.0)
    metrics = b'{"queue_time_ms": 3000.0, "time_to_first_token_ms": 1000.0}'
    decode = pair.answer(b'{"metrics": ' + metrics + b', "kv_transfer_params": ' + HANDOFF + b"}", now=106.0)[-1]
    assert (prefill.send_by, decode.send_by) == (None, 100.0 + 4.0 + 28.0)


def expire(driver: Driver, now: float) -> list[Any]:
    assert driver.leg is not None
    return driver.step(HandoffExpired(leg=driver.leg.leg), now)


def test_a39_a_handoff_that_expired_before_it_was_sent_is_renewed_and_blames_nobody(pair: Driver) -> None:
    pair.arrive()
    pair.hand_over(now=27.0)
    counted, handoff, retry, prefill = expire(pair, 28.1)
    assert counted == CountLeg(role="decode", outcome="expired")
    assert (handoff, retry) == (CountHandoff(outcome="expired"), CountRetry())
    assert (prefill.role, prefill.request_id) == ("prefill", "key-2")
    assert len(pair.fleet.usable()) == 4
    assert pair.hand_over(now=30.0)[-1].replica == "decode-0"

    # With the attempts used up the engine runs the prompt itself; nothing can be too old then.
    decode = expire(pair, 60.0)[-1]
    assert (decode.role, decode.send_by, json.loads(decode.body)) == ("decode", None, {"prompt": "hello"})
    assert status_of(pair.answer(now=61.0)) == 200
    assert pair.idle()


def test_a39_nothing_follows_an_expired_handoff_behind_a_frozen_gate(pair: Driver) -> None:
    pair.arrive()
    pair.hand_over(now=27.0)
    pair.gate.set("frozen")
    assert status_of(expire(pair, 28.1)) == 503
    assert pair.idle()


def test_one_deadline_covers_all_legs_and_attempts(pair: Driver) -> None:
    (prefill,) = pair.arrive(now=100.0)
    retried = pair.fail("broken", now=150.0)[-1]
    decode = pair.hand_over(now=170.0)[-1]
    assert (prefill.timeout_s, retried.timeout_s, decode.timeout_s) == (240.0, 190.0, 170.0)
    commands = pair.fail("timeout", now=340.0)
    assert kinds(commands) == [CountLeg, Answer]
    assert status_of(commands) == 504
    assert b"no whole answer within 240 s" in commands[-1].reply.body
    assert pair.idle()


def test_no_second_leg_after_the_deadline(pair: Driver) -> None:
    pair.arrive()
    metrics = b'{"queue_time_ms": 0.0, "time_to_first_token_ms": 239000.0}'
    commands = pair.answer(b'{"metrics": ' + metrics + b', "kv_transfer_params": ' + HANDOFF + b"}", now=240.0)
    assert commands[1] == CountHandoff(outcome="unused")
    assert status_of(commands) == 504


@pytest.mark.parametrize(("sent_at", "blamed"), [(100.0, True), (130.0, False)])
def test_the_deadline_blames_only_who_had_the_request_for_most_of_the_time(
    make_fleet: FleetMaker, sent_at: float, blamed: bool
) -> None:
    driver = Driver(make_fleet(prefill=1, decode=1, leg_failures=1))
    driver.arrive()
    driver.answer(b"{}", now=sent_at)
    driver.fail("timeout", now=240.0)
    assert driver.fleet.table.is_usable("decode-0") is not blamed


@pytest.mark.parametrize("status", [400, 404, 429])
def test_a13_a_4xx_of_either_leg_passes_through(make_fleet: FleetMaker, status: int) -> None:
    for legs in (1, 2):
        driver = Driver(make_fleet(prefill=1, decode=1))
        driver.arrive()
        if legs == 2:
            driver.hand_over()
        ended, answer = driver.answer(b"the engine's words", status=status)
        assert ended.outcome == "client_error"
        assert (answer.reply.status, answer.reply.body) == (status, b"the engine's words")
        assert driver.idle()
        assert len(driver.fleet.usable()) == 2


def test_a22_a_failed_decode_leg_is_run_again_from_the_start_elsewhere(pair: Driver) -> None:
    pair.arrive()
    pair.hand_over()
    ended, retry, prefill = pair.answer(b"{}", status=500)
    assert (ended, retry) == (CountLeg(role="decode", outcome="engine_error"), CountRetry())
    assert (prefill.role, prefill.request_id) == ("prefill", "key-2")
    decode = pair.hand_over()[-1]
    assert (decode.replica, decode.request_id) == ("decode-1", "key-2")
    assert status_of(pair.answer(b'{"error": "the engine\'s"}', status=503)) == 503
    assert pair.idle()


@pytest.mark.parametrize(("failure", "status"), [("unreachable", 503), ("broken", 502), ("engine_error", 502)])
def test_used_up_attempts_end_in_an_error_that_names_the_replica(pair: Driver, failure: str, status: int) -> None:
    pair.arrive()
    assert kinds(pair.fail(failure)) == [CountLeg, CountRetry, SendLeg]
    commands = pair.fail(failure)
    assert status_of(commands) == status
    error = json.loads(commands[-1].reply.body)["error"]
    assert (error["code"], error["param"]) == (status, None)
    assert "prefill-1" in error["message"]


def test_no_usable_replica_is_a_503_that_names_the_role(make_fleet: FleetMaker) -> None:
    driver = Driver(make_fleet(prefill=1, decode=1))
    driver.arrive()
    driver.fleet.leg_failed("decode-0", "unreachable")
    commands = driver.hand_over()
    assert commands[1] == CountHandoff(outcome="unused")
    assert status_of(commands) == 503
    assert b"no usable decode replica" in commands[-1].reply.body
    assert ("Retry-After", "1") in commands[-1].reply.headers
    assert driver.idle()


def test_a09_a10_nothing_follows_a_client_that_is_gone(pair: Driver) -> None:
    pair.arrive()
    assert pair.step(ClientGone()) == [
        CountClientGone(),
        CancelLeg(leg=1),
        CountLeg(role="prefill", outcome="cancelled"),
    ]
    assert pair.step(ClientGone()) == []
    assert pair.idle()
    with pytest.raises(InvalidTransition, match="prefill: ClientGone"):
        pair.hand_over()


def test_a17_a_200_that_says_error_is_a_failure(pair: Driver) -> None:
    pair.arrive()
    assert kinds(pair.answer(b'{"choices": [{"finish_reason": "error"}]}')) == [CountLeg, CountRetry, SendLeg]
    pair.hand_over()
    assert status_of(pair.answer(b'{"choices": [{"finish_reason": "error"}]}')) == 502


def stream(driver: Driver, head: bytes) -> list[Any]:
    driver.arrive()
    driver.hand_over()
    assert driver.leg is not None
    return driver.step(LegStreaming(leg=driver.leg.leg, head=head, content_type="text/event-stream"))


def test_a_stream_is_relayed_to_its_end(pair: Driver) -> None:
    (relay,) = stream(pair, b"data: 1\nda")
    assert isinstance(relay, StartRelay)
    assert (relay.first, relay.replica) == (b"data: 1\n", "decode-0")
    assert relay.merge.feed(b"ta: 2") == b""
    assert pair.step(StreamEnded(leg=relay.leg)) == [
        CountLeg(role="decode", outcome="ok"),
        EndRelay(last=b"data: 2"),
    ]
    assert pair.idle()


def test_a_stream_that_breaks_tells_the_client_and_is_not_retried(pair: Driver) -> None:
    stream(pair, b"data: 1\n")
    counted, end = pair.fail("broken")
    assert counted == CountLeg(role="decode", outcome="broken")
    error = json.loads(end.last.strip().removeprefix(b"data: "))["error"]
    assert error["code"] == 502
    assert pair.idle()


def test_a22_an_error_event_before_anything_else_is_retried(pair: Driver) -> None:
    commands = stream(pair, b'data: {"error": {"code": 500}}\n')
    assert kinds(commands) == [CancelLeg, CountLeg, CountRetry, SendLeg]


def test_a17_an_error_event_in_a_relayed_stream_blames_the_replica(pair: Driver) -> None:
    (relay,) = stream(pair, b"data: 1\n")
    relay.merge.feed(b'data: {"error": {"code": 500}}\n')
    counted, _ = pair.step(StreamEnded(leg=relay.leg))
    assert counted == CountLeg(role="decode", outcome="engine_error")


def test_the_gate_stops_new_requests_fresh_attempts_and_when_frozen_second_legs(make_fleet: FleetMaker) -> None:
    def driver() -> Driver:
        return Driver(make_fleet(prefill=2, decode=2))

    new = driver()
    new.gate.set("holding")
    assert status_of(new.arrive()) == 503
    between = driver()
    between.arrive()
    between.gate.set("holding")
    assert kinds(between.hand_over()) == [CountLeg, CountHandoff, SendLeg]
    assert status_of(between.fail()) == 502
    frozen = driver()
    frozen.arrive()
    frozen.gate.set("frozen")
    commands = frozen.hand_over()
    assert commands[1] == CountHandoff(outcome="unused")
    assert status_of(commands) == 503
    assert new.idle()
    assert between.idle()
    assert frozen.idle()


def test_a_fresh_attempt_in_another_layout_is_checked_again(make_fleet: FleetMaker) -> None:
    driver = Driver(make_fleet(prefill=1, decode=1, colocated=1))
    driver.fleet.leg_failed("decode-0", "unreachable")
    (sent,) = driver.arrive(b'{"prompt": "a", "n": 4}')
    assert (sent.role, sent.body) == ("colocated", b'{"prompt": "a", "n": 4}')
    driver.fleet.probe_passed("decode-0")
    commands = driver.fail("broken")
    assert status_of(commands) == 400
    assert driver.idle()


def test_a35_a_bad_body_reaches_no_engine(pair: Driver) -> None:
    assert status_of(pair.arrive(b"\xff")) == 400
    assert pair.idle()


def test_a_story_comes_with_an_impossible_event(pair: Driver) -> None:
    pair.arrive()
    with pytest.raises(InvalidTransition, match="new: Arrived; prefill: StreamEnded"):
        pair.step(StreamEnded(leg=1))


def test_a_prefill_engine_that_streams_is_a_failed_leg(pair: Driver) -> None:
    pair.arrive()
    assert pair.leg is not None
    first = pair.leg.replica
    stream = b'data: {"choices": []}\n\n'
    commands = pair.step(LegStreaming(leg=pair.leg.leg, head=stream, content_type="text/event-stream"))
    assert kinds(commands) == [CancelLeg, CountLeg, CountRetry, SendLeg]
    assert (pair.leg.role, pair.leg.replica != first) == ("prefill", True)
    commands = pair.step(LegStreaming(leg=pair.leg.leg, head=stream, content_type="text/event-stream"))
    assert status_of(commands) == 502
    assert pair.idle()
