"""Several samples or prompts in one request: a prefill/decode pair for each (field case A04)."""

from __future__ import annotations

import asyncio
import time
from collections import defaultdict
from typing import Any

import pytest

from tests.fakes.stub_engine import GENERATE
from tests.integration.router.harness import CHAT, COMPLETIONS, Bench, LeavingClient, bench, until

ROUTES = [COMPLETIONS, CHAT, GENERATE]


def _body(path: str, **sampling: Any) -> dict[str, Any]:
    """The fields beside the prompt, sampling fields where the route has them."""
    return {"sampling_params": sampling} if path == GENERATE else sampling


def _pairs(made: Bench, count: int) -> None:
    """So many pairs, each with a handoff of its own that its decode leg got."""
    prefill, decode = made.prefill[0].requests, made.decode[0].requests
    assert len(prefill) == len(decode) == count
    assert all(each.sampling["n"] == 1 for each in prefill)
    assert all(each.sampling.get("n", 1) == 1 for each in decode)
    used = [each.handoff["remote_request_id"] for each in decode]
    assert sorted(used) == sorted(each.request_id for each in prefill)
    assert len(set(used)) == count


@pytest.mark.parametrize("path", ROUTES)
def test_a04_four_samples_are_four_pairs(path: str) -> None:
    async def case() -> None:
        async with bench(fenced=True) as made:
            answer = await made.post(path, **_body(path, n=4, seed=100))
            assert answer.status == 200
            _pairs(made, 4)
            assert sorted(each.sampling["seed"] for each in made.decode[0].requests) == [100, 101, 102, 103]
            choices = answer.json["choices"]
            assert [(each["index"], each["seed"]) for each in choices] == [(0, 100), (1, 101), (2, 102), (3, 103)]
            usage = answer.json["usage"]
            assert (usage["prompt_tokens"], usage["completion_tokens"], usage["total_tokens"]) == (6, 16, 22)
            assert await made.metric("requests_total", route=path, code="200") == 1
            assert await made.metric("legs_in_flight") == await made.metric("active_sessions") == 0

    asyncio.run(case())


@pytest.mark.parametrize("path", ROUTES)
def test_a04_a_stream_of_four_samples_is_one_stream(path: str) -> None:
    async def case() -> None:
        async with bench() as made:
            made.decode[0].token_s = 0.01
            fields = {**_body(path, n=4), "stream": True, "stream_options": {"include_usage": True}}
            answer = await made.post(path, **fields)
            assert answer.status == 200
            _pairs(made, 4)
            *events, last = answer.events
            per_index: defaultdict[int, int] = defaultdict(int)
            for event in events:
                (choice,) = event["choices"]
                per_index[choice["index"]] += 1
            assert per_index == {0: 4, 1: 4, 2: 4, 3: 4}
            assert len({event["id"] for event in answer.events}) == 1
            usage = last["usage"]
            assert (last["choices"], usage["prompt_tokens"], usage["completion_tokens"]) == ([], 6, 16)
            assert answer.raw.count(b"[DONE]") == 1
            assert answer.raw.endswith(b"data: [DONE]\n\n")

    asyncio.run(case())


@pytest.mark.parametrize("prompt", [["a", "b"], [[1, 2], [3, 4]]])
def test_a04_several_prompts_are_several_pairs(prompt: list[Any]) -> None:
    async def case() -> None:
        async with bench() as made:
            answer = await made.post(COMPLETIONS, prompt=prompt, n=2)
            assert answer.status == 200
            _pairs(made, 4)
            assert [each["index"] for each in answer.json["choices"]] == [0, 1, 2, 3]
            usage = answer.json["usage"]
            assert (usage["prompt_tokens"], usage["completion_tokens"]) == (12, 16)
            for stub in made.engines:
                assert sorted(each.body["prompt"] for each in stub.requests) == [
                    each for each in prompt for _ in range(2)
                ]

    asyncio.run(case())


def test_a04_one_sample_in_a_list_is_one_pair() -> None:
    async def case() -> None:
        async with bench() as made:
            for n in (1, "1", 1.0, None):
                assert (await made.post(n=n)).status == 200
            assert len(made.prefill[0].requests) == len(made.decode[0].requests) == 4

    asyncio.run(case())


def test_a04_samples_have_a_limit() -> None:
    async def case() -> None:
        async with bench(max_samples=8) as made:
            answer = await made.post(n=9)
            assert (answer.status, answer.json["error"]["param"]) == (400, "n")
            answer = await made.post(prompt=["x"] * 9)
            assert (answer.status, answer.json["error"]["param"]) == (400, "prompt")
            assert made.prefill[0].arrived == 0
            assert (await made.post(n=8)).status == 200

    asyncio.run(case())


def test_a04_what_can_not_be_one_pair_per_sample_is_refused() -> None:
    async def case() -> None:
        async with bench() as made:
            for answer, named in (
                (await made.post(best_of=4), "best_of"),
                (await made.post(use_beam_search=True, n=2), "use_beam_search"),
            ):
                assert (answer.status, answer.json["error"]["param"]) == (400, named)
            assert made.prefill[0].arrived == 0

    asyncio.run(case())


@pytest.mark.parametrize("stream", [False, True])
def test_a04_a_sample_that_fails_is_tried_again_alone(stream: bool) -> None:
    async def case() -> None:
        async with bench() as made:
            made.decode[0].status, made.decode[0].fail_first = 500, 1
            answer = await made.post(n=4, stream=stream)
            assert answer.status == 200
            parts = answer.events if stream else [answer.json]
            assert {choice["index"] for part in parts for choice in part["choices"]} == {0, 1, 2, 3}
            assert len(made.prefill[0].requests) == len(made.decode[0].requests) == 5
            assert await made.metric("retries_total") == 1

    asyncio.run(case())


@pytest.mark.parametrize("stream", [False, True])
def test_a04_a_sample_that_can_not_be_served_ends_the_request(stream: bool) -> None:
    async def case() -> None:
        async with bench() as made:
            made.decode[0].status = 400
            answer = await made.post(n=4, stream=stream)
            assert answer.status == 400
            await until(lambda: made.dispatcher.admitted == 0)
            assert await made.metric("legs_in_flight") == await made.metric("active_sessions") == 0

    asyncio.run(case())


@pytest.mark.parametrize("several", [{"n": 2}, {"prompt": ["a", "b"]}])
def test_a11_requests_for_several_samples_spread_evenly(several: dict[str, Any]) -> None:
    async def case() -> None:
        async with bench(prefill=2, decode=2) as made:
            for _ in range(8):
                assert (await made.post(**several)).status == 200
            assert [len(stub.requests) for stub in made.engines] == [8] * 4
            assert await made.metric("active_sessions") == 0

    asyncio.run(case())


def test_a04_samples_go_ahead_of_requests_that_came_later() -> None:
    async def case() -> None:
        async with bench(max_requests=1) as made:
            decode = made.decode[0]
            decode.answers.clear()
            requests = [made.start(prompt="first")]
            await until(lambda: decode.open == 1)
            for waiting, asked in enumerate(({"prompt": "second", "n": 3}, {"prompt": "third"}), 1):
                requests.append(made.start(**asked))
                await until(lambda count=waiting: made.dispatcher.waiting == count)
            decode.answers.set()
            assert [(await each).status for each in requests] == [200] * 3
            assert [each.body["prompt"] for each in decode.requests] == ["first", *["second"] * 3, "third"]

    asyncio.run(case())


def test_a04_a_sample_that_is_refused_at_once_ends_the_request_once() -> None:
    async def case() -> None:
        async with bench(gate="holding") as made:
            running = made.start(prompt=["a", "b", "c"])
            await until(lambda: made.dispatcher.waiting == 1)
            made.dispatcher.gate.set("open")
            made.dispatcher.look_again(time.monotonic())
            # Its place is granted; by the time that it hears of it, there is none for its samples.
            made.dispatcher.fleet.drain(made.decode[0].name)
            assert (await running).status == 503
            assert await made.metric("requests_total", route=COMPLETIONS) == 1
            await until(lambda: made.dispatcher.admitted == 0)

    asyncio.run(case())


@pytest.mark.parametrize("stream", [False, True])
def test_a04_a_client_that_leaves_ends_all_samples(stream: bool) -> None:
    async def case() -> None:
        async with bench() as made:
            decode = made.decode[0]
            decode.token_s = 30.0
            client = await LeavingClient.sending(made, n=4, stream=stream)
            await until(lambda: decode.open == 4)
            await client.leave()
            await until(lambda: decode.open == 0)
            assert decode.closed_early == 4
            await until(lambda: made.dispatcher.admitted == 0)
            assert await made.metric("legs_in_flight") == await made.metric("active_sessions") == 0
            assert await made.metric("client_gone_total") == 1

    asyncio.run(case())


def test_a04_an_abort_by_id_ends_all_samples() -> None:
    async def case() -> None:
        async with bench() as made:
            decode = made.decode[0]
            decode.answers.clear()
            running = made.start(n=4, request_id="mine")
            await until(lambda: decode.open == 4)
            assert (await made.post("/abort_requests", {"request_id": "mine"})).status == 200
            assert (await running).status == 499
            await until(lambda: decode.open == 0)

    asyncio.run(case())


def test_a04_the_label_of_several_samples_names_all_epochs() -> None:
    async def case() -> None:
        async with bench(prefill=2, decode=2, policy={"type": "round_robin"}) as made:
            await made.commit(2, "v2", made.prefill[1], made.decode[1])
            answer = await made.post(n=4, return_headrace=True)
            label = answer.json["headrace"]
            used = {each.headers["x-headrace-epoch"] for stub in made.decode for each in stub.requests}
            assert sorted(map(str, label["epochs"])) == sorted(used) == ["1", "2"]
            assert label["single_version"] is False
            assert sorted(label["weight_versions"]) == ["v1", "v2"]

    asyncio.run(case())
