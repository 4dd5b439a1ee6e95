from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from router.core.split import read_prefill_reply
from router.core.stream import FIRST_LINE_LIMIT, LINE_LIMIT, StreamMerge, failed_event
from tests.unit.router.expert_rows import npy, rows_of

PREFILL = read_prefill_reply(b'{"usage": {"prompt_tokens_details": {"cached_tokens": 512}}}')
LONG = list(range(70_000, 71_000))
DONE = b"data: [DONE]\n\n"


def event(fields: Any) -> bytes:
    return b"data: " + json.dumps(fields).encode() + b"\n\n"


def through(source: bytes, make: Callable[[], StreamMerge]) -> list[Any]:
    """What comes out, the same however the stream is cut."""
    whole = make()
    expected = whole.feed(source) + whole.flush()
    for cut in range(1, len(source), max(1, len(source) // 50)):
        merge = make()
        assert merge.feed(source[:cut]) + merge.feed(source[cut:]) + merge.flush() == expected
    lines = [line.removeprefix(b"data: ") for line in expected.splitlines() if line]
    return [line.decode() if line == b"[DONE]" else json.loads(line) for line in lines]


def test_whole_lines_leave_at_once_and_untouched() -> None:
    merge = StreamMerge(PREFILL)
    assert merge.feed(b'data: {"a": 1}\n\nda') == b'data: {"a": 1}\n\n'
    assert merge.feed(b"ta: [DO") == b""
    assert merge.feed(b"NE]\n") == b"data: [DONE]\n"
    assert merge.feed(b"rest") == b""
    assert (merge.flush(), merge.flush()) == (b"rest", b"")


@pytest.mark.parametrize("end", [b"\n", b"\r\n"])
def test_a07_the_usage_chunk_is_merged_whatever_cuts_it(end: bytes) -> None:
    source = b'data: {"x":1}' + end * 2 + b'data: {"usage":{"prompt_tokens_details":{"cached_tokens":2048}}}' + end * 2
    expected = source.replace(b"2048", b"512")
    for cut in range(len(source)):
        merge = StreamMerge(PREFILL)
        assert merge.feed(source[:cut]) + merge.feed(source[cut:]) + merge.flush() == expected


def test_without_a_prefill_leg_nothing_is_merged() -> None:
    merge = StreamMerge(None)
    line = b'data: {"usage":{"prompt_tokens_details":{"cached_tokens":2048}}}\n'
    assert merge.feed(line) == line


@pytest.mark.parametrize("in_choice", [True, False])
def test_the_prompts_token_ids_are_the_prefill_engines(in_choice: bool) -> None:
    def placed(ids: Any, **choice: Any) -> Any:
        top = {} if in_choice else {"prompt_token_ids": ids}
        return {"choices": [choice | ({"prompt_token_ids": ids} if in_choice else {})], **top}

    prefill = read_prefill_reply(json.dumps(placed(LONG)).encode())
    source = event(placed([7] * len(LONG), text="a")) + event(placed(None, text="b")) + DONE
    assert through(source, lambda: StreamMerge(prefill)) == [placed(LONG, text="a"), placed(None, text="b"), "[DONE]"]


def test_expert_routing_in_the_last_event_is_joined_by_the_tokens_sent_before() -> None:
    prefill = read_prefill_reply(
        json.dumps({"choices": [{"routed_experts": npy([1, 2, 3])}], "kv_transfer_params": {"a": 1}}).encode()
    )
    chunks = [
        {"choices": [{"token_ids": [4, 5], "routed_experts": None}]},
        {"choices": [{"token_ids": [6], "routed_experts": npy([0, 0, 0, 4, 5])}]},
        {"choices": [], "usage": {"completion_tokens": 3}},
    ]
    sent = through(b"".join(map(event, chunks)) + DONE, lambda: StreamMerge(prefill))
    assert rows_of(sent[1]["choices"][0]["routed_experts"]) == [1, 2, 3, 4, 5]
    assert [*sent[:1], *sent[2:]] == [chunks[0], chunks[2], "[DONE]"]


# -- the label ------------------------------------------------------------------------------------------


def test_the_label_stands_in_the_usage_event() -> None:
    chunks: list[Any] = [{"choices": [{"text": "a"}]}, {"choices": [], "usage": {"completion_tokens": 1}}]
    sent = through(b"".join(map(event, chunks)) + DONE, lambda: StreamMerge(None, label=lambda: b'{"v":"2"}'))
    assert sent == [chunks[0], chunks[1] | {"headrace": {"v": "2"}}, "[DONE]"]


def test_without_a_usage_event_the_label_has_its_own() -> None:
    """Usage beside choices is no last event: engines send it along the way."""
    chunk = {"id": "c", "object": "o", "choices": [{"text": "a"}], "usage": {"completion_tokens": 1}}
    sent = through(event(chunk) + event(chunk) + DONE, lambda: StreamMerge(PREFILL, label=lambda: b"5"))
    assert sent == [chunk, chunk, {"id": "c", "object": "o", "choices": [], "headrace": 5}, "[DONE]"]


def test_the_label_is_made_when_the_stream_ends() -> None:
    asked: list[int] = []

    def label() -> bytes:
        asked.append(1)
        return b"1"

    merge = StreamMerge(None, label=label)
    merge.feed(event({"choices": [{"text": "a [DONE]"}]}))
    assert asked == []
    merge.feed(DONE)
    merge.feed(DONE)
    assert asked == [1]


# -- failures -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("line", "failed"),
    [
        (b'data: {"error": {"message": "x", "code": 500}}\n', True),
        (b'data: {"error": {"message": "x"}}\n', True),
        (b'data: {"error": {"message": "x", "code": 400}}\n', False),
        (b'data: {"choices": [{"finish_reason": "error"}]}\n', True),
        (b'data: {"choices": [{"text": "an \\"error\\" in the text"}]}\n', False),
        (b'data: {"choices": [{"text": "x", "error": null}]}\n', False),
        (b'event: "error"\n', False),
    ],
)
def test_events_that_say_the_engine_failed(line: bytes, failed: bool) -> None:
    assert failed_event(line) is failed
    merge = StreamMerge(None)
    assert merge.feed(line) == line
    assert merge.engine_failed is failed


def test_a_first_line_without_end_is_not_kept() -> None:
    merge = StreamMerge(None)
    assert merge.feed(b"x" * FIRST_LINE_LIMIT) == b""
    assert merge.broken is None
    assert merge.feed(b"x") == b""
    assert merge.broken is not None
    assert (merge.feed(b'\ndata: {"a":1}\n'), merge.flush()) == (b"", b"")


def test_a_first_line_may_hold_the_prompts_token_ids_and_later_ones_more() -> None:
    prefill = read_prefill_reply(json.dumps({"choices": [], "prompt_token_ids": LONG}).encode())
    merge = StreamMerge(prefill)
    merge.feed(b"x" * (FIRST_LINE_LIMIT + 5000))
    assert merge.broken is None
    merge.feed(b"\n" + b"x" * (FIRST_LINE_LIMIT * 2))
    assert merge.broken is None
    merge.feed(b"x" * LINE_LIMIT)
    assert merge.broken is not None
