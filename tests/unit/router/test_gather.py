"""Which samples of a request may start, and what the client gets of theirs."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from router.core.asks import Grant
from router.core.commands import CountClientGone, GatherSamples
from router.core.fanout import samples, samples_per_prompt
from router.core.gather import (
    BeginStream,
    EndStream,
    Gather,
    GatherCommand,
    SendWhole,
    StartSamples,
    StopSamples,
    WriteStream,
)
from router.core.label import Making
from router.core.split import parse_body

HEADERS = [("Content-Type", "application/json"), ("x-headrace-decode", "d0"), ("x-request-id", "r")]
WHOLE = b'{"choices":[{"index":0,"text":"a"}]}'
EVENT = b'data: {"choices":[{"index":0,"text":"a"}]}\n\n'
DONE = b"data: [DONE]\n\n"
OVER = (SendWhole, EndStream)


def gather_of(**fields: Any) -> Gather:
    body = parse_body(
        json.dumps({"prompt": "p", **fields}).encode(), route="completions", session_header=None, session_fields=()
    )
    parts = samples(body, limit=100)
    assert parts is not None
    asked = GatherSamples(body=body, parts=parts, per_prompt=samples_per_prompt(body), deadline=9.0)
    return Gather(asked, lambda: [making_of(sample) for sample in range(len(parts))])


def making_of(sample: int) -> Making:
    made = Making()
    made.begin_attempt()
    made.add(
        Grant(
            ticket=1, serial=1, role="decode", replica=f"d{sample}", url="", instance="", epoch=1, version="v1",
            reason="new",
        )
    )  # fmt: skip
    return made


def test_the_first_sample_of_each_prompt_goes_ahead() -> None:
    gather = gather_of(prompt=["p", "q"], n=3)
    assert gather.start() == [StartSamples([0, 3])]
    assert gather.prefilled(3) == [StartSamples([4, 5])]
    assert gather.prefilled(4) == []
    assert gather.replied(0, 200, HEADERS, WHOLE) == [StartSamples([1, 2])]
    assert gather.prefilled(0) == []


def test_whole_replies_are_joined_when_the_last_is_there() -> None:
    gather = gather_of(n=3)
    gather.start()
    assert gather.replied(0, 200, HEADERS, WHOLE) == [StartSamples([1, 2])]
    assert gather.replied(2, 200, HEADERS, WHOLE) == []
    (whole,) = gather.replied(1, 200, HEADERS, WHOLE)
    assert isinstance(whole, SendWhole)
    assert (whole.status, gather.over) == (200, True)
    assert [each["index"] for each in json.loads(whole.body)["choices"]] == [0, 1, 2]
    assert dict(whole.headers)["x-headrace-decode"] == "d0"
    assert whole.headers[:2] == [HEADERS[0], HEADERS[2]]


def test_streams_become_one() -> None:
    gather = gather_of(n=2, stream=True)
    gather.start()
    gather.prefilled(0)
    assert gather.began(200, HEADERS) == [BeginStream(200, HEADERS)]
    assert gather.wrote(0, EVENT + DONE) == EVENT
    assert gather.began(200, HEADERS) == []
    assert gather.ended(0) == []
    assert gather.wrote(1, EVENT) == EVENT.replace(b'"index":0', b'"index":1')
    assert gather.ended(1) == [WriteStream(DONE), EndStream(b"")]
    assert gather.over


def test_a_sample_that_can_not_be_had_ends_the_request() -> None:
    gather = gather_of(n=2)
    gather.start()
    assert gather.replied(0, 503, HEADERS, b"no") == [StopSamples(), SendWhole(503, HEADERS, b"no")]
    streaming = gather_of(n=2, stream=True)
    streaming.start()
    streaming.began(200, HEADERS)
    stop, end = streaming.replied(1, 504, HEADERS, b"late")
    assert (stop, isinstance(end, EndStream) and b"late" in end.last) == (StopSamples(), True)


@pytest.mark.parametrize("stream", [False, True])
def test_an_engine_that_answers_in_another_form_than_asked_for_can_not_be_joined(stream: bool) -> None:
    gather = gather_of(n=2, stream=stream)
    gather.start()
    told = gather.replied(0, 200, HEADERS, WHOLE) if stream else gather.began(200, HEADERS)
    assert [type(each) for each in told] == [StopSamples, SendWhole]
    assert [each.status for each in told if isinstance(each, SendWhole)] == [502]


def test_replies_that_can_not_be_joined_are_an_engines_failure() -> None:
    gather = gather_of(n=2)
    gather.start()
    gather.replied(0, 200, HEADERS, WHOLE)
    (whole,) = gather.replied(1, 200, HEADERS, b'{"choices":[]}')
    assert isinstance(whole, SendWhole)
    assert whole.status == 502


def test_a_client_that_leaves_ends_all_samples() -> None:
    gather = gather_of(n=2)
    gather.start()
    assert gather.client_gone() == [CountClientGone(), StopSamples()]
    assert gather.replied(0, 499, HEADERS, b"") == gather.prefilled(0) == gather.ended(0) == []


STEPS = st.lists(st.tuples(st.integers(0, 3), st.sampled_from(["prefilled", "whole", "failed", "stream", "end"])))


@given(steps=STEPS, stream=st.booleans(), two_prompts=st.booleans())
@example(steps=[(sample, "end") for sample in range(4)], stream=True, two_prompts=False)
def test_whatever_comes_the_client_is_answered_once_and_each_sample_begins_once(
    steps: list[tuple[int, str]], stream: bool, two_prompts: bool
) -> None:
    gather = gather_of(stream=stream, **({"prompt": ["p", "q"], "n": 2} if two_prompts else {"n": 4}))
    said, begun, done = list[GatherCommand](), list[int](), set[int]()
    for sample, what in [(-1, "start"), *steps]:
        if sample >= 0 and (sample not in begun or sample in done):
            continue
        told: list[GatherCommand] = []
        match what:
            case "start":
                told = gather.start()
            case "prefilled":
                told = gather.prefilled(sample)
            case "stream":
                told = gather.began(200, HEADERS)
            case "end":
                told = gather.ended(sample) if stream else []
            case "whole" | "failed":
                told = gather.replied(sample, 200 if what == "whole" else 500, HEADERS, WHOLE)
        if what in ("whole", "failed") or (what == "end" and stream):
            done.add(sample)
        for command in told:
            assert not any(isinstance(each, OVER) for each in said), "something after the end"
            said.append(command)
            begun += command.samples if isinstance(command, StartSamples) else []
    assert len(begun) == len(set(begun))
    assert gather.over == any(isinstance(each, OVER) for each in said)
    assert gather.over or done != set(range(4))
