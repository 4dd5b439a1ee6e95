"""A request that goes well, and what it is answered with."""

from __future__ import annotations

import json

import pytest

from router.core.commands import (
    CancelLeg,
    CountClientGone,
    CountHandoff,
    CountLeg,
    EndRelay,
    GatherSamples,
    SendLeg,
    StartRelay,
)
from router.core.errors import InvalidTransition
from router.core.events import LegStreaming, StreamEnded
from tests.unit.router.fleets import take_out
from tests.unit.router.flows import HANDOFF, SALTER, Driver, error_of, fields_of, kinds, pair, status_of


def test_the_two_legs_of_a_request() -> None:
    driver = pair()
    (prefill,) = driver.arrive()
    assert (prefill.role, prefill.url, prefill.path) == ("prefill", "http://prefill-0", "/v1/completions")
    assert (prefill.request_id, prefill.epoch, prefill.send_by) == ("key-1", 1, None)
    ended, counted, decode = driver.hand_over()
    assert (ended, counted) == (CountLeg(role="prefill", outcome="ok"), CountHandoff(outcome="sent"))
    assert (decode.role, decode.replica, decode.request_id) == ("decode", "decode-0", "key-1")
    assert fields_of(decode) == {"prompt": "hello", "kv_transfer_params": json.loads(HANDOFF)}
    ended, answer = driver.answer(b'{"text": "hi"}')
    assert ended == CountLeg(role="decode", outcome="ok")
    assert (answer.reply.status, answer.reply.body) == (200, b'{"text": "hi"}')
    assert set(answer.reply.headers) == {
        ("x-headrace-prefill", "prefill-0"),
        ("x-headrace-decode", "decode-0"),
        ("x-headrace-choice", "prefill=new, decode=new"),
        ("x-headrace-epoch", "1"),
        ("x-headrace-weight-version", "v1"),
        ("x-headrace-single-version", "true"),
    }
    assert driver.idle


def test_a_colocated_replica_has_one_leg() -> None:
    driver = Driver(colocated=1)
    (leg,) = driver.arrive(b'{"prompt": "a", "n": 4}')
    assert (leg.role, fields_of(leg)) == ("colocated", {"prompt": "a", "n": 4})
    assert status_of(driver.answer(b'{"text": "hi"}')) == 200
    assert driver.idle


def test_a02_without_a_handoff_decode_goes_out_at_once() -> None:
    driver = pair()
    driver.arrive()
    _, counted, decode = driver.answer(b"{}")
    assert counted == CountHandoff(outcome="missing")
    assert (fields_of(decode), decode.send_by) == ({"prompt": "hello"}, None)


def test_a02_the_prefill_leg_can_not_be_stopped_by_the_clients_stop_words() -> None:
    driver = pair()
    sent = {"prompt": "hello", "stop": ["a"], "stop_token_ids": [7], "max_tokens": 9}
    (prefill,) = driver.arrive(json.dumps(sent).encode())
    assert {"stop", "stop_token_ids"} & fields_of(prefill).keys() == set()
    assert (fields_of(prefill)["ignore_eos"], fields_of(prefill)["max_tokens"]) == (True, 1)
    assert fields_of(driver.hand_over()[-1]) == sent | {"kv_transfer_params": json.loads(HANDOFF)}


def test_a05_prompt_logprobs_are_asked_of_the_prefill_engine_and_merged() -> None:
    driver = pair()
    (prefill,) = driver.arrive(b'{"prompt": "hello", "prompt_logprobs": 1}')
    assert fields_of(prefill)["prompt_logprobs"] == 1
    reply = b'{"kv_transfer_params": ' + HANDOFF + b', "choices": [{"prompt_logprobs": [null, 2]}]}'
    decode = driver.answer(reply)[-1]
    assert "prompt_logprobs" not in fields_of(decode)
    answered = driver.answer(b'{"choices": [{"text": "x", "prompt_logprobs": null}]}')[-1]
    assert json.loads(answered.reply.body)["choices"] == [{"text": "x", "prompt_logprobs": [None, 2]}]


def test_a05_streamed_prompt_logprobs_are_refused_before_any_leg() -> None:
    driver = pair()
    commands = driver.arrive(b'{"prompt": "hello", "prompt_logprobs": 1, "stream": true}')
    assert (status_of(commands), error_of(commands)["param"]) == (400, "prompt_logprobs")
    assert driver.idle


@pytest.mark.parametrize("body", [b"\xff", b"[]", b'{"cache_salt": "a@b"}', b'{"session_id": [1]}'])
def test_a35_a_bad_body_reaches_no_engine(body: bytes) -> None:
    driver = pair()
    assert status_of(driver.arrive(body)) == 400
    assert driver.idle


def test_both_legs_of_an_attempt_are_salted_for_their_epoch_and_the_clients_salt() -> None:
    driver = pair()
    (prefill,) = driver.arrive(b'{"prompt": "hello", "cache_salt": "mine"}')
    decode = driver.hand_over()[-1]
    for leg in (prefill, decode):
        assert json.loads(leg.body)["cache_salt"] == SALTER.salt(1, "mine")


def test_the_label_comes_only_where_it_is_asked_for() -> None:
    driver = pair()
    driver.arrive(b'{"prompt": "a", "return_headrace": true}')
    assert fields_of(driver.hand_over()[-1]) == {"prompt": "a", "kv_transfer_params": json.loads(HANDOFF)}
    body = json.loads(driver.answer(b'{"text": "hi"}')[-1].reply.body)
    assert body["headrace"] == {
        "prefill": "prefill-0", "decode": "decode-0", "epochs": [1], "weight_versions": ["v1"], "single_version": True,
        "attempts": 1,
    }  # fmt: skip


def test_a_minimum_version_is_asked_of_the_dispatcher() -> None:
    driver = pair()
    assert driver.arrive(min_version="v2") == []
    assert driver.room.dispatcher.waiting == 1
    driver.room.epochs.commit(2, "v2")
    for name in driver.fleet.members:
        driver.fleet.confirm(name, 2)
    (prefill,) = driver.open()
    assert (prefill.role, prefill.epoch) == ("prefill", 2)


# -- streams -------------------------------------------------------------------------------------------------


def relayed(driver: Driver, head: bytes = b"data: 1\n", body: bytes = b'{"prompt": "a"}') -> StartRelay:
    driver.arrive(body)
    driver.hand_over()
    (relay,) = driver.stream(head)
    assert isinstance(relay, StartRelay)
    return relay


def test_a_stream_is_relayed_to_its_end() -> None:
    driver = pair()
    relay = relayed(driver, b"data: 1\nda")
    assert (relay.first, relay.replica) == (b"data: 1\n", "decode-0")
    assert ("x-headrace-decode", "decode-0") in relay.headers
    assert relay.merge.feed(b"ta: 2") == b""
    assert driver.end_stream() == [CountLeg(role="decode", outcome="ok"), EndRelay(last=b"data: 2")]
    assert driver.idle


def test_a_streams_label_comes_at_its_end() -> None:
    driver = pair()
    relay = relayed(driver, body=b'{"prompt": "a", "return_headrace": true}')
    assert b'"single_version":true' in relay.merge.feed(b"data: [DONE]\n\n")


def test_a_stream_that_breaks_tells_the_client_and_is_not_retried() -> None:
    driver = pair()
    relayed(driver)
    commands = driver.fail("broken")
    assert kinds(commands) == [CountLeg, EndRelay]
    assert commands[0] == CountLeg(role="decode", outcome="broken")
    assert error_of(commands)["code"] == 502
    assert driver.idle


def test_a17_an_error_event_in_a_relayed_stream_blames_the_replica() -> None:
    driver = pair(leg_failures=1)
    relay = relayed(driver)
    relay.merge.feed(b'data: {"error": {"code": 500}}\n')
    counted, _ = driver.end_stream()
    assert counted == CountLeg(role="decode", outcome="engine_error")
    assert driver.fleet.usable_count("decode") == 1


def test_a_client_mistake_told_in_a_stream_blames_nobody() -> None:
    driver = pair(leg_failures=1)
    relay = relayed(driver)
    relay.merge.feed(b'data: {"error": {"code": 400}}\n')
    assert driver.end_stream()[0] == CountLeg(role="decode", outcome="ok")
    assert driver.fleet.usable_count("decode") == 2


# -- clients and impossible events ---------------------------------------------------------------------------


def test_a09_a10_nothing_follows_a_client_that_is_gone() -> None:
    driver = pair()
    driver.arrive()
    assert driver.leave() == [
        CountClientGone(),
        CancelLeg(leg=1),
        CountLeg(role="prefill", outcome="cancelled"),
    ]
    assert driver.leave() == []
    assert driver.idle
    with pytest.raises(InvalidTransition, match="prefill > done > done: LegAnswered"):
        driver.hand_over()


@pytest.mark.parametrize("state", ["asking", "prefill", "asking_second", "decode", "relaying", "resting"])
def test_a09_a_client_can_leave_at_any_time(state: str) -> None:
    driver = pair()
    driver.until(state)
    driver.gate.set("open")
    commands = driver.leave()
    assert commands[0] == CountClientGone()
    assert (CancelLeg in kinds(commands)) is (state in ("prefill", "decode", "relaying"))
    assert (CountHandoff(outcome="unused") in commands) is (state == "asking_second")
    assert not any(isinstance(each, SendLeg) for each in commands)
    assert driver.idle


def test_a10_who_left_the_line_gets_no_leg() -> None:
    driver = pair()
    driver.until("asking")
    driver.leave()
    driver.gate.set("open")
    driver.room.look()
    assert driver.room.told() == []


def test_a_story_comes_with_an_impossible_event() -> None:
    driver = pair()
    driver.arrive()
    with pytest.raises(InvalidTransition, match="new > asking > prefill: StreamEnded"):
        driver.step(StreamEnded(leg=1))


def test_a_leg_that_is_not_the_live_one_is_a_mistake_of_ours() -> None:
    driver = pair()
    driver.arrive()
    driver.hand_over()
    with pytest.raises(AssertionError, match="leg 1 is not leg 2"):
        driver.step(LegStreaming(leg=1, head=b"data: 1\n", content_type="text/event-stream"))


def test_a_fresh_attempt_in_another_layout_is_checked_again() -> None:
    driver = Driver(prefill=1, decode=1, colocated=1)
    take_out(driver.fleet, "decode-0")
    body = {"prompt": "a", "prompt_logprobs": 1, "stream": True}
    (sent,) = driver.arrive(json.dumps(body).encode())
    assert (sent.role, fields_of(sent)) == ("colocated", body)
    driver.fleet.probe_passed("decode-0", 0.0)
    assert status_of(driver.rest(driver.fail("broken"))) == 400
    assert driver.idle


def test_a04_several_samples_are_served_as_requests_of_their_own_behind_separate_engines() -> None:
    driver = pair()
    (gather,) = driver.arrive(b'{"prompt": "a", "n": 3}')
    assert isinstance(gather, GatherSamples)
    assert (len(gather.parts), gather.per_prompt) == (3, 3)
    assert driver.idle
    assert driver.leave() == []


def test_more_samples_than_allowed_are_refused() -> None:
    driver = pair()
    commands = driver.arrive(b'{"prompt": "a", "n": 17}')
    assert (status_of(commands), error_of(commands)["param"]) == (400, "n")
    assert driver.idle
