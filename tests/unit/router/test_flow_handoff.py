"""The age of a handoff, and the epoch that it belongs to (field case A39)."""

from __future__ import annotations

import pytest

from router.core.commands import CountHandoff, CountLeg, CountReadmitted, CountRetry, SendLeg
from tests.unit.router.dispatchers import Room
from tests.unit.router.fleets import take_out
from tests.unit.router.flows import Driver, fields_of, kinds, metrics, pair, status_of


@pytest.mark.parametrize(("age", "sent"), [(28.0, True), (28.1, False)])
def test_a39_the_age_counts_from_the_sending_of_the_prefill_leg(age: float, sent: bool) -> None:
    driver = pair()
    driver.arrive(now=100.0)
    commands = driver.hand_over(now=100.0 + age)
    if sent:
        assert kinds(commands) == [CountLeg, CountHandoff, SendLeg]
        return
    assert commands[1:3] == [CountHandoff(outcome="expired"), CountRetry()]
    assert (commands[3].role, commands[3].request_id) == ("prefill", "key-2")
    commands = driver.hand_over(now=200.0)
    assert commands[1] == CountHandoff(outcome="expired")
    assert fields_of(commands[2]) == {"prompt": "hello"}


@pytest.mark.parametrize(("passed_s", "sent"), [(68.0, True), (68.1, False)])
def test_a39_time_that_the_engine_reports_does_not_age_the_handoff(passed_s: float, sent: bool) -> None:
    driver = pair()
    driver.arrive(now=0.0)
    commands = driver.hand_over(now=passed_s, timing=metrics(queue_ms=30_000.0, first_token_ms=10_000.0))
    assert (CountHandoff(outcome="sent") in commands) is sent
    assert (CountHandoff(outcome="expired") in commands) is not sent


def test_a39_the_decode_leg_carries_the_moment_until_which_its_handoff_may_be_sent() -> None:
    driver = pair()
    (prefill,) = driver.arrive(now=100.0)
    decode = driver.hand_over(now=106.0, timing=metrics(queue_ms=3000.0, first_token_ms=1000.0))[-1]
    assert (prefill.send_by, decode.send_by) == (None, 100.0 + 4.0 + 28.0)


def test_a39_a_handoff_that_expired_before_it_was_sent_is_renewed_and_blames_nobody() -> None:
    driver = pair(leg_failures=1)
    driver.arrive()
    driver.hand_over(now=27.0)
    counted, handoff, retry, prefill = driver.expire(28.1)
    assert counted == CountLeg(role="decode", outcome="expired")
    assert (handoff, retry) == (CountHandoff(outcome="expired"), CountRetry())
    assert (prefill.role, prefill.request_id) == ("prefill", "key-2")
    assert driver.fleet.usable_count("decode") == 2
    assert driver.hand_over(now=30.0)[-1].role == "decode"

    # With the attempts used up the engine runs the prompt itself; nothing can be too old then.
    decode = driver.expire(60.0)[-1]
    assert (decode.role, decode.send_by, fields_of(decode)) == ("decode", None, {"prompt": "hello"})
    assert status_of(driver.answer(now=61.0)) == 200
    assert driver.idle


@pytest.mark.parametrize(("waited", "role"), [(28.0, "decode"), (28.1, "prefill")])
def test_a39_a_handoff_ages_while_its_leg_waits_in_line(waited: float, role: str) -> None:
    driver = pair()
    driver.until("asking_second")
    driver.gate.set("open")
    driver.room.look(waited)
    commands = driver.deliver(waited)
    assert commands[-1].role == role
    assert (CountHandoff(outcome="expired") in commands) is (role == "prefill")
    if role == "prefill":
        driver.hand_over(now=waited)
    assert status_of(driver.answer(now=waited)) == 200
    assert driver.idle


def test_a39_a_handoff_that_is_too_old_is_never_sent_while_the_gate_holds_fresh_attempts_back() -> None:
    driver = pair()
    driver.until("asking_second")
    driver.gate.set("holding")
    driver.room.look(29.0)
    assert driver.deliver(29.0) == [CountHandoff(outcome="expired"), CountRetry()]
    assert (driver.flow.state, driver.room.dispatcher.waiting) == ("asking", 1)
    (prefill,) = driver.open(30.0)
    assert prefill.role == "prefill"


def test_a_handoff_whose_epoch_has_gone_is_dropped_for_a_fresh_pair_in_the_next() -> None:
    driver = pair()
    driver.until("asking_second")
    driver.room.epochs.commit(2, "v2")
    for name in driver.fleet.members:
        driver.fleet.confirm(name, 2)
    dropped, retry, prefill = driver.open(1.0)
    assert (dropped, retry) == (CountHandoff(outcome="unused"), CountReadmitted())
    assert (prefill.role, prefill.epoch, prefill.request_id) == ("prefill", 2, "key-2")
    decode = driver.hand_over(now=2.0)[-1]
    assert decode.epoch == 2
    headers = dict(driver.answer(now=3.0)[-1].reply.headers)
    assert (headers["x-headrace-epoch"], headers["x-headrace-weight-version"]) == ("2", "v2")
    assert driver.idle


def test_a_handoff_of_an_epoch_without_decode_replicas_is_made_anew_where_there_is_a_pair() -> None:
    room = Room(prefill=2, decode=2)
    room.epochs.commit(2, "v2")
    room.fleet.confirm("prefill-1", 2)
    room.fleet.confirm("decode-1", 2)
    driver = Driver(room=room)
    (prefill,) = driver.arrive()
    take_out(room.fleet, f"decode-{prefill.replica[-1]}")
    *_, again = driver.hand_over()
    assert (again.role, again.epoch) == ("prefill", 3 - prefill.epoch)
    assert driver.hand_over()[-1].epoch == again.epoch


def test_a_pair_that_does_not_stay_together_uses_up_no_attempt() -> None:
    driver = pair(retries=0)
    driver.until("asking_second")
    for epoch in (2, 3):
        for name in driver.fleet.members:
            driver.fleet.confirm(name, epoch)
        commands = driver.open(1.0)
        if epoch == 2:
            driver.gate.set("frozen")
            driver.hand_over(now=1.0)
    assert commands[0] == CountHandoff(outcome="unused")
    assert driver.sent().role == "prefill"
    driver.hand_over(now=2.0)
    assert status_of(driver.answer(now=3.0)) == 200
    assert driver.idle


@pytest.mark.parametrize("state", ["asking_second", "decode"])
def test_each_handoff_is_sent_or_counted_as_unused_once(state: str) -> None:
    driver = pair()
    driver.until(state)
    commands = driver.leave()
    assert commands.count(CountHandoff(outcome="unused")) == (1 if state == "asking_second" else 0)
