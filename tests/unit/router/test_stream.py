from __future__ import annotations

import pytest

from router.core.split import read_prefill_reply
from router.core.stream import StreamMerge, failed_event

PREFILL = read_prefill_reply(b'{"usage": {"prompt_tokens_details": {"cached_tokens": 512}}}')


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
