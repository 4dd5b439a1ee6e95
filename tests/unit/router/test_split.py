from __future__ import annotations

import json
from typing import Any

import pytest

from router.core.errors import RequestRefused
from router.core.split import (
    ClientBody,
    check_split,
    decode_body,
    merge_reply,
    parse_body,
    prefill_body,
    read_prefill_reply,
    reply_failed,
    single_body,
)

HANDOFF = b'{"remote_block_ids": [[1,2]],"x":{"y":[1.50,null]}}'


def parse(body: Any, header: str | None = None) -> ClientBody:
    raw = body if isinstance(body, bytes) else json.dumps(body).encode()
    return parse_body(raw, session_header=header, session_fields=("session_id", "conversation"))


@pytest.mark.parametrize(
    "raw",
    [b"", b"{", b"[]", b"null", b'{"a": 1} x', b'{"a": "\xff"}', b'{"\xff": 1}', b'{"a": "\xed\xa0\x80"}',
     b'{"session_id": "\\ud800abcdef"}', b'{"a":' + b"[" * 9000 + b"]" * 9000 + b"}"],
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
        "temperature": 0.5,
    }
    assert json.loads(prefill_body(parse(body))) == {
        "messages": body["messages"],
        "max_completion_tokens": 1,
        "max_tokens": 1,
        "stream": False,
        "n": 1,
        "ignore_eos": True,
        "temperature": 0.5,
        "kv_transfer_params": {
            "do_remote_decode": True,
            "do_remote_prefill": False,
            "remote_engine_id": None,
            "remote_block_ids": None,
            "remote_host": None,
            "remote_port": None,
        },
    }


def test_a03_a06_the_decode_leg_is_the_clients_body_and_the_handoff_byte_for_byte() -> None:
    body = {"prompt": [1, 2, 3], "stop": ["x"], "invented": {"a": [None]}, "session_id": "s", "prompt_logprobs": 1}
    sent = decode_body(parse(body), HANDOFF)
    assert HANDOFF in sent
    assert json.loads(sent) == {
        "prompt": [1, 2, 3],
        "stop": ["x"],
        "invented": {"a": [None]},
        "kv_transfer_params": json.loads(HANDOFF),
    }
    assert "kv_transfer_params" not in json.loads(decode_body(parse({"kv_transfer_params": None}), None))


def test_a_single_leg_is_the_clients_bytes_unless_a_field_is_the_routers() -> None:
    raw = b'{ "prompt":"a",  "n": 4 }'
    assert single_body(parse(raw)) is raw
    assert json.loads(single_body(parse({"prompt": "a", "conversation": "c", "request_id": "r"}))) == {"prompt": "a"}


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"n": 2}, "n"),
        ({"n": "2"}, "n"),
        ({"prompt": ["a", "b"]}, "prompt"),
        ({"prompt": [[1], [2]]}, "prompt"),
        (b'{"prompt": [' + b" " * 100 + b'"a", "b"]}', "prompt"),
        ({"prompt": "a", "prompt_embeds": "e"}, "prompt_embeds"),
        ({"prompt_embeds": ["e", "f"]}, "prompt_embeds"),
        ({"prompt": "a", "use_beam_search": True}, "use_beam_search"),
        ({"prompt": "a", "prompt_logprobs": 0, "stream": True}, "prompt_logprobs"),
        ({"prompt": "a", "prompt_logprobs": 1, "stream": "true"}, "prompt_logprobs"),
        ({"prompt": "a", "echo": True, "logprobs": 1}, "echo"),
        ({"messages": [], "echo": True}, "echo"),
        ({"prompt": "a", "truncate_prompt_tokens": -1}, "truncate_prompt_tokens"),
        ({"prompt": "a", "truncate_prompt_tokens": "-1"}, "truncate_prompt_tokens"),
        ({"prompt": "a", "kv_transfer_params": {"do_remote_prefill": True}}, "kv_transfer_params"),
    ],
)
def test_what_one_handoff_can_not_serve_is_refused_by_name(fields: Any, param: str) -> None:
    with pytest.raises(RequestRefused) as caught:
        check_split(parse(fields))
    assert caught.value.param == param


@pytest.mark.parametrize(
    "fields",
    [
        {"prompt": "a", "n": 1},
        {"prompt": "a", "n": None},
        {"prompt": ["only one"]},
        {"prompt": [[1, 2, 3]]},
        {"prompt": [1, 2, 3]},
        {"prompt": []},
        {"prompt": "a", "truncate_prompt_tokens": 100},
        {"prompt": "a", "echo": True},
        {"prompt": "a", "prompt_logprobs": 1, "stream": False},
        {"prompt": "a", "prompt_logprobs": None, "stream": True, "kv_transfer_params": None},
    ],
)
def test_what_one_handoff_can_serve_passes(fields: Any) -> None:
    check_split(parse(fields))


@pytest.mark.parametrize("handoff", [b"null", b"{}", b"[]", b"false"])
def test_an_empty_handoff_is_none(handoff: bytes) -> None:
    result = read_prefill_reply(b'{"kv_transfer_params": ' + handoff + b"}")
    assert result is not None
    assert result.handoff is None


@pytest.mark.parametrize("reply", [b"", b"oops", b"[]", b'{"choices": 3}'])
def test_a_prefill_reply_that_can_not_be_read(reply: bytes) -> None:
    assert read_prefill_reply(reply) is None


def test_a05_a07_the_reply_gets_what_only_the_prefill_engine_knows() -> None:
    prefill = read_prefill_reply(
        b'{"kv_transfer_params": {"a": 1}, "prompt_logprobs": [null, 1], "usage": {"prompt_tokens_details":'
        b' {"cached_tokens": 512}}, "choices": [{"finish_reason": "length", "prompt_logprobs": [null, 2]}]}'
    )
    reply = {
        "choices": [{"text": "a", "finish_reason": "stop", "x": 1}],
        "usage": {"prompt_tokens": 2048, "prompt_tokens_details": {"cached_tokens": 2048, "audio_tokens": 3}},
        "invented": [1],
    }
    assert json.loads(merge_reply(json.dumps(reply).encode(), prefill)) == {
        "choices": [{"text": "a", "finish_reason": "stop", "x": 1, "prompt_logprobs": [None, 2]}],
        "usage": {"prompt_tokens": 2048, "prompt_tokens_details": {"cached_tokens": 512, "audio_tokens": 3}},
        "invented": [1],
        "prompt_logprobs": [None, 1],
    }


def test_a07_what_the_prefill_engine_does_not_know_is_not_made_up() -> None:
    silent = read_prefill_reply(b'{"choices": [], "usage": {"prompt_tokens_details": null}}')
    reply = b'{"usage": {"prompt_tokens_details": {"cached_tokens": 2048}}}'
    assert json.loads(merge_reply(reply, silent)) == {"usage": {"prompt_tokens_details": {}}}
    assert merge_reply(reply, None) is reply
    plain = b'{"usage": {"prompt_tokens": 1}}'
    assert merge_reply(plain, silent) is plain


@pytest.mark.parametrize(
    ("reply", "failed"),
    [
        (b'{"choices": [{"finish_reason": "error"}]}', True),
        (b'{"choices": [{"finish_reason": "stop"}], "note": "error"}', False),
        (b'{"choices": [{"finish_reason": "stop"}]}', False),
        (b'not json "error"', False),
    ],
)
def test_a17_a_reply_that_says_it_failed(reply: bytes, failed: bool) -> None:
    assert reply_failed(reply) is failed
