"""What a client has of a stream: whole events, at the end of a token."""

from __future__ import annotations

import json
from typing import Any

import pytest

from router.core.delivered import Delivered
from router.core.split import Route, parse_body

HEAD = {"id": "c", "object": "text_completion", "created": 1, "model": "m"}
DONE = b"data: [DONE]\n\n"


def delivered(route: Route = "completions", **fields: Any) -> Delivered:
    prompt = {"completions": {"prompt": "a"}, "chat": {"messages": []}, "generate": {"token_ids": [1]}}[route]
    raw = json.dumps(prompt | {"stream": True} | fields).encode()
    return Delivered(parse_body(raw, route=route, session_header=None, session_fields=()), None)


def event(text: str, ids: list[int] | None, **more: Any) -> bytes:
    choice = {"index": 0, "text": text, "finish_reason": None, "token_ids": ids} | more
    return b"data: %b\n\n" % json.dumps(HEAD | {"choices": [choice]}, separators=(",", ":")).encode()


def texts(lines: bytes) -> list[tuple[str, list[int]]]:
    events = [json.loads(line.removeprefix(b"data: ")) for line in lines.splitlines() if line]
    return [(event["choices"][0]["text"], event["choices"][0]["token_ids"]) for event in events]


@pytest.mark.parametrize("asked", [True, False])
def test_token_ids_are_kept_and_shown_to_the_client_only_if_it_asked(asked: bool) -> None:
    kept = delivered(return_token_ids=asked)
    first = event("a", [5], prompt_token_ids=[1, 2, 3])
    shown = kept.feed(first) + kept.feed(event("b", [6, 7]))
    untouched = first + event("b", [6, 7])
    if not asked:
        untouched = event("a", None, prompt_token_ids=None) + event("b", None)
    assert shown == untouched
    assert (kept.prompt, list(kept.tokens), kept.chars) == (b"[1,2,3]", [5, 6, 7], 2)


def test_spaces_in_the_engines_json_hide_nothing() -> None:
    spaced = b'data: {"choices": [{"text": "\\"token_ids\\":[9]", "token_ids": [5, 6]}]}\n\n'
    kept = delivered()
    assert kept.feed(spaced) == spaced.replace(b'"token_ids": [5, 6]', b'"token_ids":null')
    assert list(kept.tokens) == [5, 6]


def test_a_token_without_text_waits_for_the_one_that_completes_it() -> None:
    kept = delivered(return_token_ids=True)
    assert kept.feed(event("a", [5])) == event("a", [5])
    assert kept.feed(event("", [6])) == b""
    assert list(kept.tokens) == [5]
    assert kept.feed(event("\u00e9", [7])) == event("", [6]) + event("\u00e9", [7])
    assert list(kept.tokens) == [5, 6, 7]


@pytest.mark.parametrize("last", [DONE, event("", [8], finish_reason="stop")])
def test_what_waits_leaves_before_the_end(last: bytes) -> None:
    kept = delivered(return_token_ids=True)
    kept.feed(event("", [6]))
    assert kept.feed(last) == event("", [6]) + last


def test_what_waits_when_the_leg_is_ended_is_forgotten() -> None:
    kept = delivered(return_token_ids=True)
    kept.feed(event("a", [5]) + event("", [6]))
    kept.end_leg("v1")
    assert (list(kept.tokens), kept.spans, kept.flush()) == ([5], [("v1", 0, 1)], b"")
    kept.end_leg("v2")
    assert kept.spans == [("v1", 0, 1)]


def test_with_stop_texts_the_text_is_given_back_to_its_tokens() -> None:
    """The engine withholds two characters; here they are those of the tokens that it told already."""
    kept = delivered(stop=["end"], return_token_ids=True)
    source = [("", [5]), ("a", [6]), ("bc", [7]), ("de", [8])]
    given = [texts(kept.feed(event(text, ids))) for text, ids in source]
    # In truth: 5 and 6 are "abc", 7 is "de", 8 is not known to be whole.
    assert given == [[], [], [("", [5]), ("abc", [6])], [("de", [7])]]
    last = kept.feed(event("fg", [9], finish_reason="length"))
    assert texts(last) == [("fg", [8]), ("", [9])]


def test_a_model_that_runs_on_without_text_is_not_held_back() -> None:
    kept = delivered(return_token_ids=True)
    kept.feed(event("a", [5]))
    shown = b"".join(kept.feed(event("", [number])) for number in range(100))
    assert shown == b"".join(event("", [number]) for number in range(100))
    assert kept.lost == "its tokens run ahead of their text"


@pytest.mark.parametrize(
    "choice",
    [
        {"delta": {"reasoning": "hm"}, "token_ids": [5]},
        {"delta": {"tool_calls": []}, "token_ids": [5]},
        {"delta": {}, "token_ids": [5]},
        {"delta": {"content": "a"}},
    ],
)
def test_only_plain_chats_that_tell_their_tokens_can_go_on(choice: Any) -> None:
    kept = delivered("chat")
    role = b'data: {"choices":[{"delta":{"role":"assistant","content":""},"token_ids":null}]}\n\n'
    assert kept.feed(role) == role
    assert kept.lost is None
    line = b"data: %b\n\n" % json.dumps({"choices": [choice]}, separators=(",", ":")).encode()
    assert kept.feed(line) == line.replace(b"[5]", b"null")
    assert kept.lost is not None


def test_generate_without_text_is_given_token_by_token() -> None:
    kept = delivered("generate")
    line = b'data: {"request_id":"g","choices":[{"index":0,"token_ids":[5]}]}\n\n'
    assert kept.feed(line) == line
    assert list(kept.tokens) == [5]


def test_errors_and_comments_pass() -> None:
    kept = delivered()
    error = b'data: {"error":{"code":500}}\n\n'
    assert kept.feed(b": ping\n") == b": ping\n"
    assert kept.feed(error) == error
    assert kept.lost is None
