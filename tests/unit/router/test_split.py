from __future__ import annotations

import json
from typing import Any

import pytest

from router.core.errors import RequestRefused
from router.core.split import (
    FIELDS,
    ROUTE_OF_PATH,
    ClientBody,
    Route,
    check_single,
    check_split,
    decode_body,
    parse_body,
    prefill_body,
    single_body,
)

HANDOFF = b'{"remote_block_ids": [[1,2]],"x":{"y":[1.50,null]}}'
ASKED = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}
SALT = "ours"
ROUTES = sorted(FIELDS)
LONG = list(range(70_000, 74_000))


def parse(body: Any, header: str | None = None, route: Route = "completions") -> ClientBody:
    raw = body if isinstance(body, bytes) else json.dumps(body).encode()
    return parse_body(raw, route=route, session_header=header, session_fields=("session_id", "conversation"))


def unsalted(sent: bytes) -> Any:
    fields = json.loads(sent)
    assert fields.pop("cache_salt") == SALT
    return fields


def prefill(body: Any, route: Route = "completions") -> Any:
    return unsalted(prefill_body(parse(body, route=route), salt=SALT))


def decode(body: Any, route: Route = "completions") -> Any:
    sent = decode_body(parse(body, route=route), HANDOFF, salt=SALT)
    assert HANDOFF in sent
    fields = unsalted(sent)
    del fields["kv_transfer_params"]
    return fields


# -- the body -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "raw",
    [b"", b"{", b"[]", b"null", b'{"a": 1} x', b'{"a": "\xff"}', b'{"\xff": 1}', b'{"a": "\xed\xa0\x80"}',
     b'{"session_id": "\\ud800abcdef"}', b'{"a":' + b"[" * 9000 + b"]" * 9000 + b"}", b'{"prompt": [' + b"1, " * 900],
)  # fmt: skip
def test_a35_what_is_not_a_json_object_in_utf8_is_refused(raw: bytes) -> None:
    with pytest.raises(RequestRefused) as caught:
        parse(raw)
    assert caught.value.param is None


@pytest.mark.parametrize(
    ("body", "header", "session"),
    [
        ({}, None, None),
        ({"session_id": "a"}, None, "a"),
        ({"session_id": "a"}, "from-header", "from-header"),
        ({"session_id": None, "conversation": 7}, None, "7"),
        ({"session_id": "", "conversation": "c"}, None, "c"),
    ],
)
def test_where_the_session_id_comes_from(body: Any, header: str | None, session: str | None) -> None:
    assert parse(body, header).session_id == session


@pytest.mark.parametrize("value", [True, [1], {"a": 1}, 1.5])
def test_a_session_id_of_another_kind_is_refused(value: Any) -> None:
    with pytest.raises(RequestRefused) as caught:
        parse({"session_id": value})
    assert caught.value.param == "session_id"


@pytest.mark.parametrize("value", ["x" * 257, 10**256, 10**3000])
@pytest.mark.parametrize("name", ["session_id", "conversation"])
def test_a_session_id_that_is_too_long_is_refused_by_name(name: str, value: Any) -> None:
    with pytest.raises(RequestRefused, match="at most 256 characters") as caught:
        parse({name: value})
    assert caught.value.param == name
    assert parse({name: "x" * 256}).session_id == "x" * 256


def test_a_session_id_that_is_too_long_for_a_header_is_refused_too() -> None:
    with pytest.raises(RequestRefused, match="header") as caught:
        parse({}, "x" * 257)
    assert caught.value.param == "session_id"
    assert parse({}, "x" * 256).session_id == "x" * 256


@pytest.mark.parametrize("salt", ["", "x" * 129, "a@b", "a/b", "a\\b", "a\0b", 5, ["a"], {}])
def test_a_salt_that_engines_refuse_is_refused_by_name(salt: Any) -> None:
    with pytest.raises(RequestRefused) as caught:
        parse({"cache_salt": salt})
    assert caught.value.param == "cache_salt"


@pytest.mark.parametrize(("salt", "read"), [("x" * 128, "x" * 128), ("grün", "grün"), (None, None)])
def test_a_salt_within_the_engines_limits(salt: Any, read: str | None) -> None:
    assert parse({"cache_salt": salt}).cache_salt == read
    assert parse({}).cache_salt is None


@pytest.mark.parametrize(
    ("value", "streaming"),
    [(True, True), (1, True), (1.0, True), ("true", True), ("YES", True), ("on", True), (False, False), (0, False),
     (None, False), ("false", False), ("off", False), ("no", False), (2, False), ([], False), ({}, False)],
)  # fmt: skip
def test_streaming_is_read_as_the_engines_do(value: Any, streaming: bool) -> None:
    assert parse({"stream": value}).is_streaming is streaming
    assert parse({"return_headrace": value}).wants_label is streaming


def test_nothing_asked_is_nothing_wanted() -> None:
    body = parse({"request_id": "mine"})
    assert (body.is_streaming, body.wants_label, body.request_id) == (False, False, "mine")


def test_routes_by_path() -> None:
    assert sorted(ROUTE_OF_PATH.values()) == ROUTES


@pytest.mark.parametrize(
    ("raw", "route", "tokens"),
    [
        ({"a": [1], "prompt": LONG, "b": "c"}, "completions", LONG),
        ({"token_ids": LONG, "sampling_params": {}}, "generate", LONG),
        ({"x": {"prompt": LONG}, "prompt": "short"}, "completions", "short"),
        ({"x": {"prompt": LONG}, "prompt": LONG[1:]}, "completions", LONG[1:]),
        ({"text": 'say "prompt": [1, 2] ' * 90, "prompt": LONG}, "completions", LONG),
        ({"prompt": [LONG, [1]]}, "completions", [LONG, [1]]),
        ({"prompt": ["]" * 900, '"']}, "completions", ["]" * 900, '"']),
        ({"x": {"prompt": LONG}}, "completions", None),
        (f'{{"prompt": {LONG}, "prompt": "last"}}', "completions", "last"),
        ('{"prompt"\n:\n[%s]}' % ("1 ,\n" * 900 + "2"), "completions", [1] * 900 + [2]),
    ],
)
def test_long_lists_of_tokens_pass_as_they_are(raw: Any, route: Route, tokens: Any) -> None:
    raw = raw.encode() if isinstance(raw, str) else json.dumps(raw).encode()
    body, client = parse(raw, route=route), json.loads(raw)
    for sent in (unsalted(prefill_body(body, salt=SALT)), unsalted(decode_body(body, None, salt=SALT))):
        assert sent.get("token_ids" if route == "generate" else "prompt") == tokens
        assert {name: sent[name] for name in ("a", "b", "x", "text") if name in client} == {
            name: client[name] for name in ("a", "b", "x", "text") if name in client
        }


# -- the legs -----------------------------------------------------------------------------------------------


def test_a01_a02_the_prefill_leg_is_one_token_and_ends_by_length() -> None:
    body = {
        "messages": [{"role": "user", "content": "grüße"}],
        "max_completion_tokens": 400,
        "stop": "x",
        "stop_token_ids": [1],
        "min_tokens": 5,
        "stream": True,
        "stream_options": {"include_usage": True},
        "n": 1,
        "session_id": "s",
        "request_id": "mine",
        "return_headrace": True,
        "temperature": 0.5,
    }
    assert prefill(body, "chat") == {
        "messages": body["messages"],
        "max_completion_tokens": 1,
        "max_tokens": 1,
        "stream": False,
        "n": 1,
        "ignore_eos": True,
        "temperature": 0.5,
        "kv_transfer_params": ASKED,
    }
    kept = {name: value for name, value in body.items() if name not in ("session_id", "request_id", "return_headrace")}
    assert decode(body, "chat") == kept
    assert "max_tokens" not in kept


def test_a01_a02_on_the_generate_route_the_caps_and_stops_are_one_level_deeper() -> None:
    sampling = {"max_tokens": 400, "stop": ["x"], "min_tokens": 2, "logprobs": 5, "n": 1, "seed": 3, "invented": [None]}
    body = {"token_ids": [1, 2], "sampling_params": sampling, "stream": True, "invented": {"a": 1}, "request_id": "r"}
    assert prefill(body, "generate") == {
        "token_ids": [1, 2],
        "sampling_params": {"max_tokens": 1, "n": 1, "ignore_eos": True, "seed": 3, "invented": [None]},
        "stream": False,
        "invented": {"a": 1},
        "kv_transfer_params": ASKED,
    }
    assert decode(body, "generate") == {name: value for name, value in body.items() if name != "request_id"}


@pytest.mark.parametrize("sampling", ["{}", None, 3, [1]])
def test_sampling_params_of_another_kind_are_left_for_the_engine_to_refuse(sampling: Any) -> None:
    body = {"token_ids": [1], "sampling_params": sampling}
    assert (prefill(body, "generate")["sampling_params"], decode(body, "generate")) == (sampling, body)
    check_split(parse(body, route="generate"))


def test_a03_a06_the_decode_leg_is_the_clients_body_and_the_handoff() -> None:
    body = {"prompt": [1, 2, 3], "stop": ["x"], "invented": {"a": [None]}, "session_id": "s", "prompt_logprobs": 1}
    assert decode(body) == {"prompt": [1, 2, 3], "stop": ["x"], "invented": {"a": [None]}}
    assert "kv_transfer_params" not in unsalted(decode_body(parse({"kv_transfer_params": None}), None, salt=SALT))


def test_a05_scores_of_the_prompt_are_asked_of_the_prefill_engine_alone() -> None:
    scored = {"prompt_logprobs": 1, "prompt_logprob_token_ids": [[1]], "prompt_logprob_start": 0}
    body = {"token_ids": [1, 2], "sampling_params": scored}
    assert prefill(body, "generate")["sampling_params"].items() >= scored.items()
    assert decode(body, "generate")["sampling_params"] == {}
    assert prefill({"prompt": "a", "prompt_logprobs": 1})["prompt_logprobs"] == 1
    assert decode({"prompt": "a", "prompt_logprobs": 1}) == {"prompt": "a"}


def test_the_handoff_is_read_though_the_cache_is_not() -> None:
    body = {"token_ids": [1], "sampling_params": {"skip_reading_prefix_cache": True}}
    assert prefill(body, "generate")["sampling_params"]["skip_reading_prefix_cache"] is True
    assert decode(body, "generate")["sampling_params"] == {}


@pytest.mark.parametrize("name", ["tools", "tool_choice", "response_format", "chat_template_kwargs", "documents"])
def test_both_chat_legs_see_what_a_template_may_show(name: str) -> None:
    body = {"messages": [], name: {"a": 1}}
    assert prefill(body, "chat")[name] == decode(body, "chat")[name] == {"a": 1}


@pytest.mark.parametrize(
    "name", ["logprobs", "logprob_token_ids", "structured_outputs", "response_format", "min_tokens"]
)
def test_the_thrown_away_token_is_not_worked_on(name: str) -> None:
    body = {"prompt": "a", name: 1}
    assert name not in prefill(body)
    assert decode(body) == body


@pytest.mark.parametrize("route", ROUTES)
def test_the_routers_salt_stands_in_place_of_the_clients(route: Route) -> None:
    for body in ({"cache_salt": "mine", "x": 1}, {"x": 1}):
        parsed = parse(body, route=route)
        for sent in (prefill_body(parsed, salt=SALT), decode_body(parsed, None, salt=SALT)):
            assert json.loads(sent)["cache_salt"] == SALT
        assert json.loads(single_body(parsed, salt=SALT)) == {"x": 1, "cache_salt": SALT}


def test_a_single_leg_is_the_clients_body_without_the_fields_of_the_router() -> None:
    owned = {"prompt": "a", "n": 4, "conversation": "c", "request_id": "r", "return_headrace": 1}
    assert unsalted(single_body(parse(owned), salt=SALT)) == {"prompt": "a", "n": 4}


# -- refusals -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [2, 2.0, "2", " 3 ", "2.0", 10**30])
@pytest.mark.parametrize("route", ROUTES)
def test_a04_several_samples_on_one_handoff_are_refused_however_they_are_spelled(route: Route, count: Any) -> None:
    body = {"sampling_params": {"n": count}} if route == "generate" else {"n": count}
    with pytest.raises(RequestRefused) as caught:
        check_split(parse(body, route=route))
    assert caught.value.param == "n"


@pytest.mark.parametrize("count", [1, 1.0, "1", "1.0", True, None, 0, "many", 1.5, [2], "1e999", "nan"])
@pytest.mark.parametrize("route", ROUTES)
def test_a04_one_sample_passes_and_what_engines_refuse_is_left_to_them(route: Route, count: Any) -> None:
    check_split(parse({"sampling_params": {"n": count}} if route == "generate" else {"n": count}, route=route))


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"prompt": ["a", "b"]}, "prompt"),
        ({"prompt": [[1], [2]]}, "prompt"),
        (b'{"prompt": [' + b" " * 100 + b'"a", "b"]}', "prompt"),
        ({"prompt": "a", "prompt_embeds": "e"}, "prompt_embeds"),
        ({"prompt_embeds": ["e", "f"]}, "prompt_embeds"),
        ({"prompt": "a", "use_beam_search": True}, "use_beam_search"),
        ({"prompt": "a", "use_beam_search": "on"}, "use_beam_search"),
        ({"prompt": "a", "best_of": 2}, "best_of"),
        ({"prompt": "a", "prompt_logprobs": 0, "stream": True}, "prompt_logprobs"),
        ({"prompt": "a", "prompt_logprobs": 1, "stream": "true"}, "prompt_logprobs"),
        ({"prompt": "a", "echo": True, "logprobs": 1}, "echo"),
        ({"prompt": "a", "truncate_prompt_tokens": -1}, "truncate_prompt_tokens"),
        ({"prompt": "a", "truncate_prompt_tokens": "-1"}, "truncate_prompt_tokens"),
        ({"prompt": "a", "truncate_prompt_tokens": -1.0}, "truncate_prompt_tokens"),
    ],
)
def test_what_one_handoff_can_not_serve_is_refused_by_name(fields: Any, param: str) -> None:
    with pytest.raises(RequestRefused) as caught:
        check_split(parse(fields))
    assert caught.value.param == param


@pytest.mark.parametrize("names", [("n", "prompt"), ("prompt", "n")])
def test_of_two_refused_fields_the_first_that_was_sent_is_named(names: tuple[str, str]) -> None:
    values = {"n": 2, "prompt": ["a", "b"]}
    with pytest.raises(RequestRefused) as caught:
        check_split(parse({name: values[name] for name in names}))
    assert caught.value.param == names[0]


@pytest.mark.parametrize(
    ("fields", "route", "param"),
    [
        ({"messages": [], "echo": True}, "chat", "echo"),
        ({"messages": [], "prompt_logprobs": 1, "stream": 1}, "chat", "prompt_logprobs"),
        ({"sampling_params": {"prompt_logprobs": 1}, "stream": True}, "generate", "prompt_logprobs"),
        ({"sampling_params": {"prompt_logprob_token_ids": [[1]]}, "stream": True}, "generate",
         "prompt_logprob_token_ids"),
    ],
)  # fmt: skip
def test_refusals_of_the_other_routes(fields: Any, route: Route, param: str) -> None:
    with pytest.raises(RequestRefused) as caught:
        check_split(parse(fields, route=route))
    assert caught.value.param == param


@pytest.mark.parametrize(
    "fields",
    [
        {"prompt": "a", "n": 1},
        {"prompt": ["only one"]},
        {"prompt": [[1, 2, 3]]},
        {"prompt": [1, 2, 3]},
        {"prompt": []},
        {"prompt": None, "prompt_embeds": "e"},
        {"prompt": "a", "prompt_embeds": []},
        {"prompt": "a", "best_of": 1},
        {"prompt": "a", "truncate_prompt_tokens": 100},
        {"prompt": "a", "echo": True},
        {"prompt": "a", "prompt_logprobs": 1, "stream": False},
        {"prompt": "a", "prompt_logprobs": None, "stream": True, "kv_transfer_params": None},
        {"prompt": "a", "use_beam_search": False},
    ],
)
def test_what_one_handoff_can_serve_passes(fields: Any) -> None:
    check_split(parse(fields))


OWN_HANDOFFS: list[tuple[Route, Any, str]] = [
    ("completions", {"kv_transfer_params": {"do_remote_prefill": True}}, "kv_transfer_params"),
    ("generate", {"kv_transfer_params": {}}, "kv_transfer_params"),
    ("completions", {"vllm_xargs": {"x": 1, "kv_transfer_params": {}}}, "vllm_xargs"),
    ("chat", {"vllm_xargs": {"kv_transfer_params": "text"}}, "vllm_xargs"),
    ("generate", {"sampling_params": {"extra_args": {"kv_transfer_params": None}}}, "extra_args"),
]


@pytest.mark.parametrize("check", [check_split, check_single])
@pytest.mark.parametrize(("route", "fields", "param"), OWN_HANDOFFS)
def test_a_clients_own_handoff_reaches_no_engine(check: Any, route: Route, fields: Any, param: str) -> None:
    with pytest.raises(RequestRefused, match="is set by the router") as caught:
        check(parse(fields, route=route))
    assert caught.value.param == param


@pytest.mark.parametrize(
    ("route", "fields"),
    [
        ("completions", {"prompt": ["a", "b"], "n": 4, "use_beam_search": True, "vllm_xargs": {"x": [1, 2]}}),
        ("chat", {"messages": [], "echo": True, "kv_transfer_params": None, "vllm_xargs": None}),
        ("generate", {"stream": True, "sampling_params": {"n": 4, "prompt_logprobs": 1, "extra_args": {"x": 1}}}),
        ("generate", {"sampling_params": "no object"}),
    ],
)
def test_an_engine_that_does_both_is_asked_for_what_one_handoff_can_not_serve(route: Route, fields: Any) -> None:
    check_single(parse(fields, route=route))
