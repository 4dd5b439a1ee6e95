"""Streams of a real engine, cut and continued: greedy, they say what the uncut stream says."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from router.core.continuable import tracked
from router.core.continuation import Continuation, Ended, RelayedStream, continue_stream
from router.core.delivered import Delivered
from router.core.split import ROUTE_OF_PATH, ClientBody, parse_body, single_body
from router.core.stream import StreamMerge
from tests.engines.fenced_engine import CALL_TIMEOUT_S, Engine

pytestmark = [pytest.mark.stack, pytest.mark.timeout(600)]

TEXT = "The answer to everything is é: "
COMMON: dict[str, Any] = {
    "model": "tiny",
    "stream": True,
    "stream_options": {"include_usage": True, "continuous_usage_stats": True},
}
SAMPLING: dict[str, Any] = {"temperature": 0, "max_tokens": 40, "min_tokens": 12, "logprobs": 1}
TOKENS = list(range(40, 90))
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "completions, text": ("/v1/completions", {**SAMPLING, "prompt": TEXT, "return_token_ids": True}),
    "completions, token ids": ("/v1/completions", {**SAMPLING, "prompt": TOKENS, "ignore_eos": True}),
    "chat": (
        "/v1/chat/completions",
        {**SAMPLING, "messages": [{"role": "user", "content": TEXT}], "logprobs": True, "return_token_ids": True},
    ),
    "chat without a cap": (
        "/v1/chat/completions",
        {"messages": [{"role": "user", "content": TEXT * 30}], "temperature": 0},
    ),
    "generate": ("/inference/v1/generate", {"token_ids": TOKENS, "sampling_params": SAMPLING}),
    "generate, text": (
        "/inference/v1/generate",
        {"token_ids": TOKENS, "sampling_params": SAMPLING, "output_mode": "text", "return_token_ids": True},
    ),
}
HEADERS = {"content-type": "application/json", "accept-encoding": "identity"}
CUTS = [(1,), (2,), (13,), (3, 1, 9)]
"""How many events each run but the last one gets to send."""


def events_of(engine: Engine, path: str, body: bytes, count: int | None) -> Iterator[bytes]:
    """The stream's first `count` events, each as it came; then the connection is closed."""
    url, headers = f"{engine.plan.url}{path}", engine.right_headers() | HEADERS
    with httpx.stream("POST", url, content=body, headers=headers, timeout=CALL_TIMEOUT_S, trust_env=False) as reply:
        assert reply.status_code == 200, reply.read()
        seen = 0
        for line in reply.iter_lines():
            seen += bool(line)
            if count is not None and seen > count:
                return
            yield line.encode() + b"\n"


def streamed(engine: Engine, path: str, body: ClientBody, cuts: tuple[int, ...]) -> bytes:
    delivered = Delivered(body, None)
    again = tracked(body)
    assert again is not None
    going = Continuation(body=again, stream=None, chat_prompt=None)
    text = b""
    for run, count in enumerate((*cuts, None)):
        leg = going.leg_body(single_body(going.body, salt=f"epoch-{run}"))
        stream = RelayedStream(StreamMerge(None), going.stream, delivered)
        for lines in events_of(engine, path, leg, count):
            text += stream.feed(lines)
            assert stream.broken is None
        if count is None:
            text += stream.flush()
            break
        answer = continue_stream(body, delivered, version="default")
        if isinstance(answer, Ended):
            return text + answer.last
        assert isinstance(answer, Continuation), answer
        going = answer
    return text


def told(text: bytes) -> dict[str, Any]:
    """What a client reads, and the fields that it sees in each event."""
    assert text.endswith(b"data: [DONE]\n\n")
    events = [json.loads(part.removeprefix(b"data: ")) for part in text.split(b"\n\n")[:-2]]
    assert not any("error" in event for event in events), text
    choices = [choice for event in events for choice in event["choices"]]
    deltas = [choice.get("delta", choice) for choice in choices]
    usage = events[-1].pop("usage")
    usage.pop("prompt_tokens_details", None)
    logprobs = [choice.get("logprobs") or {} for choice in choices]
    return {
        "ids": len({event.get("id") or event["request_id"] for event in events}),
        "text": "".join(delta.get("content") or delta.get("text") or "" for delta in deltas),
        "roles": [delta["role"] for delta in deltas if "role" in delta],
        "token_ids": [one for choice in choices for one in choice.get("token_ids") or []],
        "prompts": [ids for each in (*events, *choices) if (ids := each.get("prompt_token_ids"))],
        "offsets": [one for each in logprobs for one in each.get("text_offset", [])],
        "scored": [one.get("token", one.get("token_id")) for each in logprobs for one in each.get("content", [])],
        "finish": [(c["finish_reason"], c["stop_reason"]) for c in choices if c["finish_reason"]],
        "versions": [spans for choice in choices if (spans := choice.get("weight_versions"))],
        "usage": usage,
        # An ending of the router's own making has no fingerprint of an engine.
        "fields": {tuple(sorted(each.keys() - {"system_fingerprint"})) for each in (*events, *choices)},
    }


def uncut(engine: Engine, path: str, fields: dict[str, Any]) -> dict[str, Any]:
    return told(b"".join(events_of(engine, path, json.dumps(fields).encode(), None)))


def client_body(path: str, fields: dict[str, Any]) -> ClientBody:
    route = ROUTE_OF_PATH[path]
    return parse_body(json.dumps(fields).encode(), route=route, session_header=None, session_fields=())


@pytest.mark.parametrize("case", CASES)
def test_a_continued_stream_is_the_uncut_one(served: Engine, case: str) -> None:
    path, more = CASES[case]
    fields = COMMON | more
    expected = uncut(served, path, fields)
    for cuts in CUTS:
        assert told(streamed(served, path, client_body(path, fields), cuts)) == expected, cuts


@pytest.mark.parametrize("included", [False, True])
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_a_stop_text_that_a_cut_falls_into_is_found(served: Engine, path: str, included: bool) -> None:
    prompt = {"prompt": TEXT} if path == "/v1/completions" else {"messages": [{"role": "user", "content": TEXT}]}
    fields = COMMON | {"temperature": 0, "max_tokens": 60, "ignore_eos": True, "return_token_ids": True} | prompt
    text = uncut(served, path, fields)["text"]
    at = len(text) // 2
    fields |= {"stop": [text[at : at + 4], "never said"], "include_stop_str_in_output": included}
    expected = uncut(served, path, fields)
    assert expected["finish"] == [("stop", text[at : at + 4])]
    tokens = len(expected["token_ids"])
    for cut in (tokens - 4, tokens - 3, tokens - 2, tokens - 1, tokens + 1):
        assert told(streamed(served, path, client_body(path, fields), (cut,))) == expected, cut
