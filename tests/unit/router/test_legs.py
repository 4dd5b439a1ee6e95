from __future__ import annotations

import json
from typing import Any

import pytest

from router.core.asks import Grant
from router.core.commands import CancelLeg, CountChoice, CountHandoff, CountLeg, EndLeg, ParkLeg, SendLeg
from router.core.events import Arrived
from router.core.gate import Gate
from router.core.legs import Legs
from router.core.retry import RetryBudget
from router.core.rules import FlowRules, FlowTools
from router.core.split import parse_body, read_prefill_reply
from tests.unit.router.flows import HANDOFF, SALTER

RULES = FlowRules(
    retries=1,
    retry_backoff_s=0.0,
    request_timeout_s=100.0,
    leg_timeout_s=30.0,
    handoff_lifetime_s=28.0,
    session_fields=("session_id",),
    readmit_streams=False,
    max_samples=16,
)
BODY = b'{"prompt": "a", "max_tokens": 9, "session_id": "s", "cache_salt": "mine"}'


def make_legs() -> Legs:
    arrival = Arrived(
        number=1, route="completions", path="/v1/completions", body=BODY, session_header=None, min_version=None,
        request_key="key",
    )  # fmt: skip
    body = parse_body(BODY, route="completions", session_header=None, session_fields=("session_id",))
    budget = RetryBudget.full(per_request=0.0, most=1)
    legs = Legs(body, None, arrival, FlowTools(gate=Gate(), salter=SALTER, budget=budget, rules=RULES), deadline=100.0)
    legs.begin_attempt()
    return legs


def grant(role: Any = "prefill", epoch: int = 5) -> Grant:
    return Grant(
        ticket=70, serial=1, role=role, replica=f"{role}-0", url="http://x", instance="life", epoch=epoch, version="v",
        reason="new",
    )  # fmt: skip


def sent(commands: list[Any] | None) -> SendLeg:
    assert commands is not None
    assert isinstance(commands[-1], SendLeg)
    return commands[-1]


def hand_over(legs: Legs, now: float, *, sent_at: float = 0.0) -> bool:
    legs.send_first(grant(), sent_at)
    result = read_prefill_reply(b'{"kv_transfer_params": ' + HANDOFF + b"}")
    assert result is not None
    leg = legs.live_leg()
    legs.end("ok", now)
    return legs.take_handoff(leg, result, now)


def test_a_leg_is_addressed_to_one_life_of_one_replica_in_one_epoch() -> None:
    choice, leg = make_legs().send_first(grant(), 10.0)
    assert choice == CountChoice(role="prefill", reason="new")
    assert isinstance(leg, SendLeg)
    assert (leg.replica, leg.instance, leg.epoch, leg.url, leg.path, leg.request_id) == (
        "prefill-0", "life", 5, "http://x", "/v1/completions", "key-1",
    )  # fmt: skip


@pytest.mark.parametrize(
    ("role", "max_tokens", "transfer"),
    [("prefill", 1, True), ("decode", 9, False), ("colocated", 9, False)],
)
def test_each_role_gets_its_body_with_the_salt_of_its_epoch(role: str, max_tokens: int, transfer: bool) -> None:
    body = json.loads(sent(make_legs().send_first(grant(role), 0.0)).body)
    assert (body["max_tokens"], "kv_transfer_params" in body, "session_id" in body) == (max_tokens, transfer, False)
    assert body["cache_salt"] == SALTER.salt(5, "mine")
    other = json.loads(sent(make_legs().send_first(grant(role, epoch=6), 0.0)).body)
    assert other["cache_salt"] == SALTER.salt(6, "mine")


def test_the_time_of_a_leg_ends_with_that_of_the_request() -> None:
    assert sent(make_legs().send_first(grant(), 10.0)).until == 40.0
    late = sent(make_legs().send_first(grant(), 90.0))
    assert (late.until, late.deadline) == (100.0, 100.0)


def test_a_handoff_is_sent_once() -> None:
    legs = make_legs()
    assert hand_over(legs, 1.0)
    commands = legs.send_second(grant("decode"), 2.0)
    assert commands is not None
    assert commands[0] == CountHandoff(outcome="sent")
    leg = sent(commands)
    assert (json.loads(leg.body)["kv_transfer_params"], leg.send_by) == (json.loads(HANDOFF), 28.0)
    legs.end("broken", 3.0)
    again = sent(legs.send_second(grant("decode"), 4.0))
    assert ("kv_transfer_params" in json.loads(again.body), again.send_by) == (False, None)


def test_a39_a_handoff_past_its_lease_is_not_kept_and_not_sent() -> None:
    assert not hand_over(make_legs(), 28.1)
    legs = make_legs()
    assert hand_over(legs, 28.0)
    assert legs.send_second(grant("decode"), 28.1) is None
    assert legs.live is None


def test_an_unused_handoff_is_counted_and_a_forgotten_one_is_not() -> None:
    legs = make_legs()
    hand_over(legs, 1.0)
    assert legs.drop_handoff() == [CountHandoff(outcome="unused")]
    assert legs.drop_handoff() == []
    other = make_legs()
    hand_over(other, 1.0)
    other.forget_handoff()
    assert other.drop_handoff() == []


def test_at_most_one_leg_is_alive() -> None:
    legs = make_legs()
    legs.send_first(grant(), 0.0)
    with pytest.raises(AssertionError, match="a second live leg"):
        legs.send_first(grant(), 0.0)
    with pytest.raises(AssertionError, match="an attempt beside a live leg"):
        legs.begin_attempt()
    with pytest.raises(AssertionError, match="leg 2 is not leg 1"):
        legs.live_leg(2)


def test_no_attempt_begins_with_anothers_handoff() -> None:
    legs = make_legs()
    hand_over(legs, 1.0)
    with pytest.raises(AssertionError, match="a handoff left over"):
        legs.begin_attempt()


def test_attempts_have_ids_of_their_own_and_legs_numbers() -> None:
    legs = make_legs()
    first = sent(legs.send_first(grant(), 0.0))
    legs.end("broken", 1.0)
    legs.begin_attempt()
    second = sent(legs.send_first(grant(), 1.0))
    assert (first.request_id, second.request_id) == ("key-1", "key-2")
    assert first.leg != second.leg


def test_the_end_of_a_leg_says_how_it_went_and_how_long_it_took() -> None:
    legs = make_legs()
    legs.send_first(grant(), 10.0)
    end, counted = legs.end("ok", 12.5, cached_tokens=7)
    assert isinstance(end, EndLeg)
    assert (end.end.ticket, end.end.outcome, end.end.seconds, end.end.cached_tokens) == (70, "ok", 2.5, 7)
    assert counted == CountLeg(role="prefill", outcome="ok")
    assert legs.live is None
    with pytest.raises(AssertionError, match="is over"):
        legs.end("ok", 13.0)


def test_a27_a_leg_that_may_not_be_closed_is_parked_and_stays_alive() -> None:
    legs = make_legs()
    assert legs.stop("cancelled", 0.0, may_close=False) == []
    legs.send_first(grant(), 0.0)
    assert legs.stop("cancelled", 1.0, may_close=False) == [ParkLeg(leg=1)]
    assert legs.live is not None
    closed = legs.stop("cancelled", 2.0, may_close=True)
    assert closed[0] == CancelLeg(leg=1)
    assert legs.live is None
