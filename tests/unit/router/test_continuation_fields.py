"""Which requests' streams can go on, and what of their bodies the next run is sent."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest

from router.core.continuable import CONTINUED_FIELDS, CONTINUED_SAMPLING_FIELDS, tracked, why_not
from router.core.continuation import Continuation, continue_stream
from router.core.delivered import Delivered
from router.core.split import FIELDS, SAMPLING_FIELDS, ClientBody, Route, parse_body

PROMPTS: dict[Route, dict[str, Any]] = {
    "completions": {"prompt": "a"},
    "chat": {"messages": [{"role": "user", "content": "a"}]},
    "generate": {"token_ids": [1, 2]},
}
ROUTES = sorted(PROMPTS)


def body_of(route: Route, **fields: Any) -> ClientBody:
    raw = json.dumps(PROMPTS[route] | {"stream": True} | fields).encode()
    return parse_body(raw, route=route, session_header=None, session_fields=())


def next_fields(body: ClientBody, tokens: list[int]) -> dict[str, Any]:
    """The body of the run after one that delivered these tokens."""
    delivered = Delivered(body, None)
    shown = {"text": "x", "token_ids": tokens}
    if body.route == "chat":
        delivered.feed(b'data: {"choices":[{"delta":{"role":"assistant","content":""}}],"prompt_token_ids":[1,2]}\n')
        shown = {"delta": {"content": "x"}, "token_ids": tokens}
    elif body.route == "completions":
        shown["prompt_token_ids"] = [1, 2]
    delivered.feed(b"data: %b\n" % json.dumps({"choices": [shown]}).encode())
    answer = continue_stream(body, delivered, version="v")
    assert isinstance(answer, Continuation)
    fields: dict[str, Any] = json.loads(answer.leg_body(msgspec.json.encode(answer.body.fields)))
    return fields


@pytest.mark.parametrize("route", ROUTES)
def test_every_field_of_the_split_table_has_a_row(route: Route) -> None:
    assert set(CONTINUED_FIELDS[route]) == set(FIELDS[route])
    assert set(CONTINUED_SAMPLING_FIELDS) == set(SAMPLING_FIELDS)


ON_ALL: list[tuple[str, Any, Any]] = [
    ("presence_penalty", 0.5, 0.0),
    ("frequency_penalty", -1, 0),
    ("bad_words", ["a"], []),
    ("watermarking", True, False),
    ("spaces_between_special_tokens", False, True),
    ("repetition_detection", {"min_count": 2}, None),
    ("thinking_token_budget", 5, None),
    ("structured_outputs", {"regex": "a"}, None),
    ("n", 2, 1),
]
"""A field, a value that prevents and one that does not."""
ON_SOME: list[tuple[Route, str, Any, Any]] = [
    ("completions", "response_format", {"type": "json_object"}, {"type": "text"}),
    ("completions", "prompt", ["a", "b"], [1, 2]),
    ("completions", "prompt_embeds", "AAAA", None),
    ("completions", "echo", True, False),
    ("completions", "vllm_xargs", {"a": 1}, {}),
    ("completions", "kv_transfer_params", {"a": 1}, None),
    ("completions", "use_beam_search", True, False),
    ("chat", "tools", [{"type": "function", "function": {"name": "f"}}], []),
    ("chat", "echo", True, False),
    ("chat", "messages", [{"role": "user", "content": [{"image_url": {"url": "u"}}]}],
     [{"role": "user", "content": [{"type": "text", "text": "a"}]}]),
    ("generate", "features", {"mm_hashes": {}}, None),
    ("generate", "content_parts", [{"type": "image_url"}], []),
    ("generate", "sampling_params", {"stop": "a"}, {"stop": []}),
    ("generate", "sampling_params", {"extra_args": {"a": 1}}, {"extra_args": {}}),
]  # fmt: skip


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize(("name", "prevents", "allows"), ON_ALL)
def test_what_counts_output_alone_can_not_be_carried_over(route: Route, name: str, prevents: Any, allows: Any) -> None:
    for value, reason in ((prevents, f"{name} can't be carried over"), (allows, None), (None, None)):
        body = body_of(route, **({"sampling_params": {name: value}} if route == "generate" else {name: value}))
        assert why_not(body) == reason
        assert (tracked(body) is None) is (reason is not None)


@pytest.mark.parametrize(("route", "name", "prevents", "allows"), ON_SOME)
def test_nor_what_the_next_run_could_not_be_told(route: Route, name: str, prevents: Any, allows: Any) -> None:
    assert why_not(body_of(route, **{name: prevents})) is not None
    assert why_not(body_of(route, **{name: allows})) is None


def test_an_echo_is_tracked_where_the_client_itself_asks_for_token_ids() -> None:
    """With them the engine leaves the prompt's text out of it."""
    assert tracked(body_of("completions", echo=True, return_token_ids=True)) is not None


def test_generate_carries_stop_texts_over_where_it_tells_the_text() -> None:
    assert why_not(body_of("generate", sampling_params={"stop": ["a"]}, output_mode="text")) is None


@pytest.mark.parametrize("route", ["completions", "chat"])
def test_a_tracked_stream_is_asked_for_its_token_ids(route: Route) -> None:
    body = body_of(route, seed=3)
    found = tracked(body)
    assert found is not None
    assert json.loads(msgspec.json.encode(found.fields)) == json.loads(msgspec.json.encode(body.fields)) | {
        "return_token_ids": True
    }
    assert found.fields == found.sampling
    assert tracked(body_of(route, stream=False)) is None


def test_generate_tells_them_unasked() -> None:
    body = body_of("generate")
    assert tracked(body) is body


@pytest.mark.parametrize(
    ("sent", "left"),
    [
        ({"max_tokens": 10, "min_tokens": 5}, {"max_tokens": 7, "min_tokens": 2}),
        ({"min_tokens": 2}, {"max_tokens": 13, "min_tokens": 0}),
        ({"max_tokens": None}, {"max_tokens": 13}),
        ({"max_tokens": "10", "echo": True, "suffix": "s", "truncate_prompt_tokens": 2, "prompt_logprobs": 0,
          "return_token_ids": True}, {"max_tokens": 7, "return_token_ids": True}),
    ],
)  # fmt: skip
def test_completions_go_on_from_all_tokens_with_the_rest_of_the_cap(sent: Any, left: Any) -> None:
    fields = next_fields(body_of("completions", seed=1, **sent), [5, 6, 7])
    expected = {"prompt": [1, 2, 5, 6, 7], "stream": True, "seed": 1, "return_token_ids": True}
    assert fields == expected | left


def test_chats_go_on_with_the_prompt_beside_the_handoff() -> None:
    sent = {"max_tokens": 2, "max_completion_tokens": 9, "truncate_prompt_tokens": 2}
    fields = next_fields(body_of("chat", **sent), [5, 6, 7])
    assert fields == PROMPTS["chat"] | {
        "stream": True,
        "return_token_ids": True,
        "max_completion_tokens": 6,
        "max_tokens": 1,
        "kv_transfer_params": {"prompt_token_ids": [1, 2, 5, 6, 7]},
    }


def test_generate_goes_on_from_its_own_prompt() -> None:
    sampling = {"max_tokens": 9, "prompt_logprobs": 0, "stop_token_ids": [3]}
    fields = next_fields(body_of("generate", sampling_params=sampling, token_offsets=[[0, 1], [1, 2]]), [5])
    assert fields == {
        "token_ids": [1, 2, 5],
        "stream": True,
        "sampling_params": {"max_tokens": 8, "stop_token_ids": [3]},
    }
