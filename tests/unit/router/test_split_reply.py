from __future__ import annotations

import base64
import json
from typing import Any

import pytest

from router.core.split import FIELDS, SAMPLING_FIELDS, PrefillResult, merge_reply, read_prefill_reply, reply_failed
from router.core.split.experts import join_experts
from tests.unit.router.expert_rows import npy, rows_of

LONG = list(range(70_000, 71_000))


def read(reply: Any) -> PrefillResult:
    result = read_prefill_reply(json.dumps(reply).encode())
    assert result is not None
    return result


def merged(reply: Any, prefill: Any) -> Any:
    return json.loads(merge_reply(json.dumps(reply).encode(), read(prefill)))


# -- the prefill engine's reply --------------------------------------------------------------------------


@pytest.mark.parametrize("handoff", [b"null", b"{}", b"[]", b"false"])
def test_an_empty_handoff_is_none(handoff: bytes) -> None:
    result = read_prefill_reply(b'{"kv_transfer_params": ' + handoff + b"}")
    assert result is not None
    assert result.handoff is None


def test_a03_a_handoff_with_token_ids_of_its_own_stays_byte_for_byte() -> None:
    handoff = json.dumps({"prompt_token_ids": LONG, "x": [1.50, None]}).encode()
    result = read_prefill_reply(b'{"choices": [], "kv_transfer_params": ' + handoff + b"}")
    assert result is not None
    assert (result.handoff, result.token_ids) == (handoff, None)


@pytest.mark.parametrize("reply", [b"", b"oops", b"[]", b'{"choices": 3}', b"\xff"])
def test_a_prefill_reply_that_can_not_be_read(reply: bytes) -> None:
    assert read_prefill_reply(reply) is None


@pytest.mark.parametrize("name", ["cached_tokens", "created_cache_tokens"])
@pytest.mark.parametrize("count", [2**53 + 1, 2**64, -(2**64)])
def test_counts_that_no_prompt_can_have_are_no_reply(name: str, count: int) -> None:
    """Larger ones than 2**64 could not be told to the process that decides, and a replica's place would be lost."""
    reply = {"choices": [], "usage": {"prompt_tokens_details": {name: count}}}
    assert read_prefill_reply(json.dumps(reply).encode()) is None


@pytest.mark.parametrize(
    ("reply", "failed"),
    [
        (b'{"choices": [{"finish_reason": "error"}]}', True),
        (b'{"choices": [{"finish_reason": "stop"}], "note": "error"}', False),
        (b'{"choices": [{"finish_reason": "stop"}]}', False),
        (b'not json "error"', True),
        (b"", True),
        (b' {"choices": []}\n', False),
    ],
)
def test_a17_a_reply_that_says_it_failed(reply: bytes, failed: bool) -> None:
    assert reply_failed(reply) is failed


# -- what is merged -------------------------------------------------------------------------------------


def test_a05_a07_the_reply_gets_what_only_the_prefill_engine_knows() -> None:
    prefill = {
        "kv_transfer_params": {"a": 1},
        "prompt_logprobs": [None, 1],
        "prompt_token_id_logprobs": "c2NvcmVz",
        "usage": {"prompt_tokens_details": {"cached_tokens": 512, "created_cache_tokens": 1536}},
        "choices": [{"finish_reason": "length", "prompt_logprobs": [None, 2]}],
    }
    reply = {
        "choices": [{"text": "a", "finish_reason": "stop", "x": 1}],
        "usage": {"prompt_tokens": 2048, "prompt_tokens_details": {"cached_tokens": 2048, "audio_tokens": 3}},
        "invented": [1],
    }
    assert merged(reply, prefill) == {
        "choices": [{"text": "a", "finish_reason": "stop", "x": 1, "prompt_logprobs": [None, 2]}],
        "usage": {"prompt_tokens": 2048, "prompt_tokens_details": {"cached_tokens": 512, "audio_tokens": 3}},
        "invented": [1],
        "prompt_logprobs": [None, 1],
        "prompt_token_id_logprobs": "c2NvcmVz",
    }


@pytest.mark.parametrize(
    ("details", "known", "expected"),
    [
        ({"cached_tokens": 9, "created_cache_tokens": 9}, {"cached_tokens": 5, "created_cache_tokens": 4},
         {"cached_tokens": 5, "created_cache_tokens": 4}),
        ({"cached_tokens": 9, "created_cache_tokens": 9}, {"cached_tokens": 0},
         {"cached_tokens": 0, "created_cache_tokens": None}),
        ({"cached_tokens": 9, "created_cache_tokens": None}, {"cached_tokens": 5},
         {"cached_tokens": 5, "created_cache_tokens": None}),
        ({"multimodal_tokens": {"image": 3}}, {"cached_tokens": 5}, {"multimodal_tokens": {"image": 3}}),
        ({"cached_tokens": 9}, None, {"cached_tokens": None}),
        (None, {"cached_tokens": 5}, None),
    ],
)  # fmt: skip
def test_a07_cache_counts_are_the_prefill_engines_and_none_is_made_up(details: Any, known: Any, expected: Any) -> None:
    reply = {"note": "cached_tokens", "usage": {"prompt_tokens_details": details}}
    result = merged(reply, {"choices": [], "usage": {"prompt_tokens_details": known}})
    assert result["usage"]["prompt_tokens_details"] == expected


def test_a06_a_reply_with_nothing_to_merge_is_untouched() -> None:
    silent = read({"choices": []})
    for reply in (b'{"usage": {"prompt_tokens": 1},  "x":1.50}', b"not json", b'{"usage": "cached_tokens"'):
        assert merge_reply(reply, silent) is reply
        assert merge_reply(reply, None) is reply


@pytest.mark.parametrize("ids", [[1, 2, 3], LONG])
def test_the_prompts_token_ids_are_the_prefill_engines(ids: list[int]) -> None:
    usage = {"prompt_tokens_details": {"cached_tokens": 9}}
    known = {"prompt_tokens_details": {"cached_tokens": 5}}
    chat = merged(
        {"choices": [{"token_ids": LONG}], "prompt_token_ids": [7] * len(ids), "usage": usage},
        {"choices": [{}], "prompt_token_ids": ids, "usage": known},
    )
    assert chat == {"choices": [{"token_ids": LONG}], "prompt_token_ids": ids, "usage": known}
    completions = merged(
        {"choices": [{"prompt_token_ids": [7] * len(ids)}], "usage": usage},
        {"choices": [{"prompt_token_ids": ids}], "usage": known},
    )
    assert completions == {"choices": [{"prompt_token_ids": ids}], "usage": known}


def test_token_ids_that_were_not_asked_for_stay_away() -> None:
    silent = {"choices": [{"prompt_token_ids": None}], "prompt_token_ids": None}
    assert merged(silent, {"choices": [{"prompt_token_ids": LONG}]}) == silent
    told = {"choices": [], "prompt_token_ids": LONG}
    assert merged(told, silent) == told


def test_all_that_the_table_calls_merged_is_merged() -> None:
    """In the place where the route has it."""
    tables = [*FIELDS.items(), ("generate", SAMPLING_FIELDS)]
    names = {(route, rule.merged) for route, table in tables for rule in table.values() if rule.merged}
    for route, name in names:
        in_choice = name == "routed_experts" or (route == "completions" and name != "prompt_token_id_logprobs")
        ours: Any = npy([1, 2]) if name == "routed_experts" else [1, 2]
        theirs: Any = npy([9, 9]) if name == "routed_experts" else [9, 9]
        usage = {"completion_tokens": 1}
        prefill: dict[str, Any] = {"choices": [{}], "kv_transfer_params": {"a": 1}}
        reply: dict[str, Any] = {"choices": [{}], "usage": usage}
        (prefill["choices"][0] if in_choice else prefill)[name] = ours
        (reply["choices"][0] if in_choice else reply)[name] = theirs
        result = merged(reply, prefill)
        found = (result["choices"][0] if in_choice else result)[name]
        assert (rows_of(found) if name == "routed_experts" else found) == [1, 2], (route, name)


# -- expert routing -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("theirs", "tokens", "expected"),
    [
        # All rows, those of the prompt of no meaning.
        ([0, 0, 0, 4, 5], 3, [1, 2, 3, 4, 5]),
        # Only what the decode engine computed: the prompt's last token, which it runs again, and its own.
        ([3, 4, 5], 3, [1, 2, 3, 4, 5]),
        ([4, 5], 3, [1, 2, 3, 4, 5]),
        # The one token was never forwarded.
        ([0, 0, 0], 1, [1, 2, 3]),
        ([], 1, [1, 2, 3]),
    ],
)
def test_rows_of_the_prompt_are_the_prefill_engines(theirs: list[int], tokens: int, expected: list[int]) -> None:
    reply = {"choices": [{"routed_experts": npy(theirs)}], "usage": {"completion_tokens": tokens}}
    prefill = {"choices": [{"routed_experts": npy([1, 2, 3])}], "kv_transfer_params": {"a": 1}}
    assert rows_of(merged(reply, prefill)["choices"][0]["routed_experts"]) == expected


def test_rows_that_routed_experts_prompt_start_leaves_out_stay_out() -> None:
    """Both engines skip the same rows; here all of the prompt's."""
    reply = {"choices": [{"routed_experts": npy([4, 5])}], "usage": {"completion_tokens": 3}}
    prefill = {"choices": [{"routed_experts": npy([])}], "kv_transfer_params": {"a": 1}}
    assert rows_of(merged(reply, prefill)["choices"][0]["routed_experts"]) == [4, 5]


@pytest.mark.parametrize(
    "theirs",
    [
        npy([1], dtype="<u2"),
        npy([1], order=True),
        npy([1], shape="(1, 3, 2)"),
        npy([1, 1], shape="(4, 2, 3)"),
        npy([1], shape="()"),
        "not base64!",
        base64.b64encode(b"\x93NUMPY\x02\x00").decode(),
        base64.b64encode(b"\x93NUMPY\x01\x00").decode(),
        "",
    ],
)
def test_rows_that_do_not_fit_together_are_not_joined(theirs: str) -> None:
    assert join_experts(npy([1, 2]).encode(), theirs.encode(), output_tokens=2) is None
    assert join_experts(npy([1, 2]).encode(), npy([3]).encode(), output_tokens=2) is not None


@pytest.mark.parametrize("tokens", [0, 5])
def test_counts_of_output_that_can_not_be_are_not_joined(tokens: int) -> None:
    assert join_experts(npy([1]).encode(), npy([2]).encode(), output_tokens=tokens) is None


def test_rows_of_a_prompt_that_no_engine_ran_are_not_passed_off_as_routing() -> None:
    reply = {"choices": [{"routed_experts": npy([0, 0, 3]), "x": 1}], "usage": {"completion_tokens": 2}}
    prefill: dict[str, Any] = {"choices": [{}], "kv_transfer_params": {"a": 1}}
    assert merged(reply, prefill)["choices"] == [{"routed_experts": None, "x": 1}]
    # Without a handoff the decode engine ran the prompt itself.
    assert merged(reply, prefill | {"kv_transfer_params": None}) == reply


# -- the label ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("reply", "expected"),
    [
        (b'{"a": 1}\n', {"a": 1, "headrace": {"v": "2"}}),
        (b"{}", {"headrace": {"v": "2"}}),
        (b'{"a": {}}', {"a": {}, "headrace": {"v": "2"}}),
    ],
)
def test_the_label_stands_at_the_top(reply: bytes, expected: Any) -> None:
    assert json.loads(merge_reply(reply, None, label=b'{"v": "2"}')) == expected
    usage = {"prompt_tokens_details": {"cached_tokens": 5}}
    labelled = merge_reply(
        b'{"usage": {"prompt_tokens_details": {"cached_tokens": 9}}}', read({"usage": usage}), label=b"1"
    )
    assert json.loads(labelled) == {"usage": usage, "headrace": 1}
