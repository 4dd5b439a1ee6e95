"""What is read from kept requests of the three routes, whole and streamed, and from replays."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest

from connectors.replays import Generated, NotReplayable, read_generated, read_replay, replay_body

USAGE = {"prompt_tokens": 3, "prompt_tokens_details": {"cached_tokens": 2}}
GIVEN = Generated(prompt=(1, 2, 3), tokens=(7, 8), logprobs=(-0.5, -1.5), cached_tokens=2)
CONTENT = {"content": [{"logprob": -0.5}, {"logprob": -1.5}]}
COMPLETION = {
    "choices": [
        {
            "index": 0,
            "prompt_token_ids": [1, 2, 3],
            "token_ids": [7, 8],
            "logprobs": {"token_logprobs": [-0.5, -1.5]},
        }
    ],
    "usage": USAGE,
}
CHAT = {
    "prompt_token_ids": [1, 2, 3],
    "choices": [{"index": 0, "token_ids": [7, 8], "logprobs": CONTENT}],
    "usage": USAGE,
}
GENERATE = {"choices": [{"index": 0, "token_ids": [7, 8], "logprobs": CONTENT}], "usage": USAGE}
TEXT = {"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}]}, {"role": "user", "content": "b"}]}


def stream(*events: Any) -> bytes:
    return b"".join(b"data: %b\n\n" % json.dumps(each).encode() for each in events) + b"data: [DONE]\n\n"


@pytest.mark.parametrize(
    ("body", "reply"),
    [({"prompt": "abc"}, COMPLETION), (TEXT, CHAT), ({"token_ids": [1, 2, 3]}, GENERATE)],
)
def test_whole_replies(body: dict[str, Any], reply: dict[str, Any]) -> None:
    assert read_generated(body, json.dumps(reply).encode()) == GIVEN


def test_a_stream_token_by_token() -> None:
    first = {
        "choices": [
            {"index": 0, "prompt_token_ids": [1, 2, 3], "token_ids": [7], "logprobs": {"token_logprobs": [-0.5]}}
        ]
    }
    second = {"choices": [{"index": 0, "token_ids": [8], "logprobs": {"token_logprobs": [-1.5]}}]}
    last = {"choices": [], "usage": USAGE}
    assert read_generated({"prompt": "abc"}, stream(first, second, last)) == GIVEN
    cut_off = stream(first, second)[:-40]
    assert read_generated({"prompt": "abc"}, cut_off).tokens == (7,)


def test_a_log_probability_that_is_no_number_is_kept_as_such() -> None:
    choice = {"index": 0, "prompt_token_ids": [1], "token_ids": [7], "logprobs": {"token_logprobs": [None]}}
    (score,) = read_generated({"prompt": "a"}, stream({"choices": [choice]})).logprobs
    assert math.isnan(score)


@pytest.mark.parametrize(
    ("body", "reply", "why"),
    [
        ({}, {"choices": [{"index": 0, "text": "a"}]}, "token ids"),
        ({}, {**COMPLETION, "choices": [{**COMPLETION["choices"][0], "logprobs": None}]}, "log-probabilities"),  # type: ignore[dict-item, index]
        ({}, {"choices": [{"index": 0}, {"index": 1}]}, "several samples"),
        ({"echo": True}, COMPLETION, "begins with the prompt"),
        ({"messages": [{"content": [{"type": "image_url"}]}]}, CHAT, "more than text"),
        ({"token_ids": [1], "features": {"mm_hashes": {}}}, GENERATE, "more than text"),
    ],
)
def test_what_cannot_be_replayed_is_said(body: dict[str, Any], reply: dict[str, Any], why: str) -> None:
    with pytest.raises(NotReplayable, match=why):
        read_generated(body, json.dumps(reply).encode())


def replayed(tokens: list[int], scores: list[dict[str, float]]) -> bytes:
    return json.dumps({"choices": [{"token_ids": tokens, "logprobs": {"top_logprobs": scores}}]}).encode()


def test_a_replay_is_read_up_to_where_it_goes_another_way() -> None:
    scores = [{"token_id:7": -0.5, "token_id:8": -4.0}, {"token_id:9": -0.1, "token_id:8": -1.5}, {"token_id:5": -1.0}]
    assert read_replay(replayed([7, 9, 5], scores), (7, 8, 5)) == (-0.5, -1.5)
    assert read_replay(replayed([7, 8, 5], scores), (7, 8, 5)) == (-0.5, -1.5, -1.0)
    assert read_replay(replayed([4], [{"token_id:4": -0.1}]), (7, 8)) == ()


def test_a_replay_asks_for_the_tokens_that_were_given() -> None:
    body = replay_body("m", (1, 2, 3), (8, 7, 8), "salt")
    assert (body["prompt"], body["max_tokens"], body["logprob_token_ids"]) == ([1, 2, 3], 3, [7, 8])
    assert (body["cache_salt"], body["temperature"]) == ("salt", 0)
