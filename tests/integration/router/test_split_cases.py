"""The split seen from both ends: what the engines get, what the client gets (field cases A01 to A03, A05 to A07)."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from tests.fakes.stub_engine import GENERATE, HANDOFF
from tests.integration.router.harness import CHAT, COMPLETIONS, bench
from tests.unit.router.expert_rows import npy, rows_of

ROUTES = [COMPLETIONS, CHAT, GENERATE]


def _sampling(path: str, **fields: Any) -> dict[str, Any]:
    """Sampling fields, where the route has them."""
    return {"sampling_params": fields} if path == GENERATE else fields


def test_a01_the_newer_cap_is_cut_on_the_prefill_leg_only() -> None:
    async def case() -> None:
        async with bench() as made:
            answer = await made.post(CHAT, max_completion_tokens=400, stream=True)
            assert answer.status == 200
            (first,), (second,) = made.prefill[0].requests, made.decode[0].requests
            caps = {key: first.body[key] for key in ("max_tokens", "max_completion_tokens", "stream")}
            assert caps == {"max_tokens": 1, "max_completion_tokens": 1, "stream": False}
            assert first.generated == 1
            assert second.body["max_completion_tokens"] == 400
            assert "max_tokens" not in second.body

    asyncio.run(case())


@pytest.mark.parametrize("path", ROUTES)
def test_a01_prefill_makes_one_token_whatever_the_client_caps(path: str) -> None:
    async def case() -> None:
        async with bench() as made:
            for fields in (_sampling(path, max_tokens=3), _sampling(path)):
                assert (await made.post(path, **fields)).status == 200
            assert [each.generated for each in made.prefill[0].requests] == [1, 1]
            assert [each.generated for each in made.decode[0].requests] == [3, 4]
            assert [each.sampling.get("max_tokens") for each in made.decode[0].requests] == [3, None]

    asyncio.run(case())


@pytest.mark.parametrize("path", ROUTES)
def test_a02_stops_stay_off_the_prefill_leg(path: str) -> None:
    async def case() -> None:
        async with bench() as made:
            stops: dict[str, Any] = {"stop": ["x"], "stop_token_ids": [7], "min_tokens": 3, "ignore_eos": False}
            assert (await made.post(path, **_sampling(path, **stops))).status == 200
            first, second = made.prefill[0].requests[0].sampling, made.decode[0].requests[0].sampling
            assert first["ignore_eos"] is True
            assert not {"stop", "stop_token_ids", "min_tokens"} & first.keys()
            assert {key: second[key] for key in stops} == stops

    asyncio.run(case())


def test_a02_a_missing_handoff_is_counted_and_served() -> None:
    async def case() -> None:
        async with bench() as made:
            made.prefill[0].handoff = None
            assert (await made.post()).status == 200
            assert "kv_transfer_params" not in made.decode[0].requests[0].body
            assert await made.metric("handoffs_total", outcome="missing") == 1
            assert await made.metric("handoffs_total", outcome="sent") == 0
            assert await made.metric("retries_total") == 0

    asyncio.run(case())


@pytest.mark.parametrize("path", ROUTES)
def test_a03_the_handoff_arrives_whole(path: str) -> None:
    async def case() -> None:
        async with bench() as made:
            assert (await made.post(path)).status == 200
            first, second = made.prefill[0].requests[0], made.decode[0].requests[0]
            assert (first.handoff["do_remote_decode"], first.handoff["do_remote_prefill"]) == (True, False)
            assert first.generated == 1
            assert second.handoff == {**HANDOFF, "remote_request_id": first.request_id}
            assert len(second.handoff) == 12
            assert b'"nested": [true, null, 1.5]' in second.raw
            assert second.computed_prompt_tokens == 0

    asyncio.run(case())


@pytest.mark.parametrize("path", ROUTES)
def test_a05_prompt_logprobs_come_from_the_prefill_leg(path: str) -> None:
    async def case() -> None:
        async with bench() as made:
            made.decode[0].dies_on = "prompt_logprobs"
            asked = _sampling(path, prompt_logprobs=1)
            answer = await made.post(path, **asked)
            assert answer.status == 200
            assert made.prefill[0].requests[0].sampling["prompt_logprobs"] == 1
            reply = answer.json["choices"][0] if path == COMPLETIONS else answer.json
            assert len(reply["prompt_logprobs"]) == 6
            assert reply["prompt_logprobs"][0] is None
            assert made.decode[0].healthy

            answer = await made.post(path, **asked, stream=True)
            assert (answer.status, answer.json["error"]["param"]) == (400, "prompt_logprobs")

    asyncio.run(case())


@pytest.mark.parametrize("stream", [False, True])
def test_a06_unknown_fields_pass_both_ways(stream: bool) -> None:
    async def case() -> None:
        async with bench() as made:
            made.decode[0].extra = {"prompt_token_ids": [1, 2], "invented_reply": {"x": [1]}}
            made.decode[0].choice_extra = {"token_ids": [5], "invented_choice": "abc"}
            body = {
                "prompt": "hello",
                "return_token_ids": True,
                "invented": {"deep": [1, None]},
                "temperature": 0.7,
                "max_tokens": 9,
                "stream": stream,
                "session_id": "s1",
            }
            answer = await made.post(COMPLETIONS, body)
            first, second = made.prefill[0].requests[0].body, made.decode[0].requests[0].body
            client = {key: value for key, value in body.items() if key != "session_id"}
            routers = {"kv_transfer_params", "cache_salt"}
            assert {key: value for key, value in second.items() if key not in routers} == client
            same = client.keys() - {"max_tokens", "stream"}
            assert {key: first[key] for key in same} == {key: client[key] for key in same}
            assert first.keys() - client.keys() == {"n", "ignore_eos", *routers}
            for reply in answer.events if stream else [answer.json]:
                assert reply["invented_reply"] == {"x": [1]}
                assert reply["prompt_token_ids"] == [1, 2]
                assert reply["choices"][0]["token_ids"] == [5]
                assert reply["choices"][0]["invented_choice"] == "abc"

    asyncio.run(case())


def test_a06_expert_routing_is_the_prompts_from_prefill_and_the_outputs_from_decode() -> None:
    async def case() -> None:
        async with bench() as made:
            # A row per token but the last sampled one: 6 of the prompt, 3 of the output; what decode says of the
            # prompt's is of no prompt that it ran.
            made.prefill[0].choice_extra = {"routed_experts": npy([1, 2, 3, 4, 5, 6])}
            made.decode[0].choice_extra = {"routed_experts": npy([0, 0, 0, 0, 0, 0, 7, 8, 9])}
            answer = await made.post()
            assert rows_of(answer.json["choices"][0]["routed_experts"]) == [1, 2, 3, 4, 5, 6, 7, 8, 9]

    asyncio.run(case())


@pytest.mark.parametrize("stream", [False, True])
def test_a07_cached_tokens_are_the_prefill_engines(stream: bool) -> None:
    async def case() -> None:
        async with bench() as made:
            for stub in (made.prefill[0], made.decode[0]):
                stub.prompt_tokens = 2048
            made.prefill[0].cached_tokens, made.decode[0].cached_tokens = 512, 2048
            options: dict[str, Any] = {"stream": True, "stream_options": {"include_usage": True}} if stream else {}
            answer = await made.post(**options)
            usage = answer.events[-1]["usage"] if stream else answer.json["usage"]
            assert usage["prompt_tokens_details"] == {"cached_tokens": 512, "other": 1}

            made.decode[0].cached_tokens = None
            answer = await made.post(**options)
            usage = answer.events[-1]["usage"] if stream else answer.json["usage"]
            assert "prompt_tokens_details" not in usage

    asyncio.run(case())


def test_a07_without_a_prefill_leg_the_engines_own_figure_is_used() -> None:
    async def case() -> None:
        async with bench(prefill=0, decode=0, colocated=1) as made:
            made.colocated[0].cached_tokens = 2048
            answer = await made.post()
            assert answer.json["usage"]["prompt_tokens_details"]["cached_tokens"] == 2048

    asyncio.run(case())


def test_a_colocated_engine_gets_the_clients_values_and_a_salt() -> None:
    async def case() -> None:
        async with bench(prefill=0, decode=0, colocated=1) as made:
            body = b'{"prompt" : ["a", "b"],  "n":4, "prompt_logprobs": 1, "x":1.50}'
            answer = await made.post(COMPLETIONS, body)
            assert answer.status == 200
            (sent,) = made.colocated[0].requests
            assert sent.body.pop("cache_salt")
            assert sent.body == {"prompt": ["a", "b"], "n": 4, "prompt_logprobs": 1, "x": 1.5}
            assert b"1.50" in sent.raw
            assert answer.prefill == answer.decode == "colocated-0"

    asyncio.run(case())
