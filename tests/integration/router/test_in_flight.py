"""What becomes of running requests while the gate is holding: wait, abort, readmit, keep."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from tests.integration.router.harness import Answer, Bench, bench, turns, until


async def _hold(made: Bench, **fields: Any) -> asyncio.Task[Answer]:
    """A request that its decode engine works on without a byte, and a gate that holds."""
    made.decode[0].answers.clear()
    running = made.start(**fields)
    await until(lambda: made.decode[0].open == 1)
    await made.set_gate("holding")
    return running


@pytest.mark.parametrize("state", ["open", "frozen"])
@pytest.mark.parametrize("mode", ["wait", "abort", "readmit", "keep"])
def test_it_is_for_a_gate_that_holds(mode: str, state: str) -> None:
    async def case() -> None:
        async with bench(gate=state) as made:
            answer = await made.command("/in_flight", {"mode": mode})
            assert (answer.status, answer.json["error"]["param"]) == (409, "mode")
            assert state in answer.message

    asyncio.run(case())


def test_wait_answers_when_the_last_has_ended() -> None:
    async def case() -> None:
        async with bench(fenced=True) as made:
            running = await _hold(made)
            waiting = asyncio.create_task(made.command("/in_flight", {"mode": "wait"}))
            await turns()
            assert not waiting.done()
            made.decode[0].answers.set()
            assert (await running).status == 200
            answer = await waiting
            assert (answer.status, answer.json) == (200, {"mode": "wait", "requests": 1})

    asyncio.run(case())


def test_wait_has_a_limit_and_names_what_still_runs() -> None:
    async def case() -> None:
        async with bench(fenced=True) as made:
            running = await _hold(made)
            answer = await made.command("/in_flight", {"mode": "wait", "timeout_s": 0.1})
            assert (answer.status, answer.json["error"]["param"]) == (409, "timeout_s")
            assert made.decode[0].requests[0].request_id in answer.message
            made.decode[0].answers.set()
            assert (await running).status == 200

    asyncio.run(case())


def test_abort_ends_with_an_error_that_may_be_retried() -> None:
    async def case() -> None:
        async with bench(fenced=True) as made:
            running = await _hold(made)
            answer = await made.command("/in_flight", {"mode": "abort"})
            assert (answer.status, answer.json["requests"]) == (200, 1)
            # Confirmed: the engine has seen its client leave, and its fence no longer lists the request.
            decode = made.decode[0]
            assert (decode.open, decode.closed_early) == (0, 1)
            ended = await running
            assert (ended.status, ended.headers["Retry-After"]) == (503, "1")
            assert await made.metric("legs_in_flight") == 0

    asyncio.run(case())


@pytest.mark.parametrize(("mode", "status"), [("wait", 409), ("abort", 409), ("readmit", 409), ("keep", 200)])
def test_a27_what_an_engine_has_not_ended_yet_is_waited_for(mode: str, status: int) -> None:
    """Its client left before the hold, and the abort is still under way."""

    async def case() -> None:
        async with bench(fenced=True) as made:
            fence = made.prefill[0].fence
            assert fence is not None
            aborted_slowly = fence.accept("r-1")
            await made.set_gate("holding")
            answer = await made.command("/in_flight", {"mode": mode, "timeout_s": 0.1})
            assert answer.status == status
            assert status == 200 or "these still run: r-1" in answer.message
            fence.end(aborted_slowly)
            assert (await made.command("/in_flight", {"mode": mode})).status == 200

    asyncio.run(case())


def test_abort_ends_a_stream_with_an_error_event() -> None:
    async def case() -> None:
        async with bench(fenced=True) as made:
            decode = made.decode[0]
            decode.token_s = 30.0
            running = made.start(stream=True)
            await until(lambda: len(decode.sent_at) == 1)
            await made.set_gate("holding")
            assert (await made.command("/in_flight", {"mode": "abort"})).status == 200
            answer = await running
            assert answer.status == 200
            assert answer.events[0]["choices"][0]["text"] == "a"
            assert answer.events[-1]["error"]["code"] == 503
            assert (decode.open, decode.closed_early) == (0, 1)

    asyncio.run(case())


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_readmit_runs_a_request_again_under_the_next_weights(role: str, stream: bool) -> None:
    async def case() -> None:
        async with bench(fenced=True) as made:
            engine = getattr(made, role)[0]
            engine.answers.clear()
            running = made.start(stream=stream, return_headrace=True)
            await until(lambda: engine.open == 1)
            await made.set_gate("holding")
            answer = await made.command("/in_flight", {"mode": "readmit"})
            assert (answer.status, answer.json["requests"]) == (200, 1)
            assert (engine.open, engine.closed_early) == (0, 1)
            assert await made.metric("requests_waiting") == await made.metric("readmitted_total") == 1
            assert await made.metric("legs_in_flight") == 0

            await made.set_gate("frozen")
            engine.answers.set()
            await made.commit(2, "v2")
            await made.set_gate("open")
            ended = await running
            assert (ended.status, ended.headers["x-headrace-epoch"]) == (200, "2")
            label = (ended.events[-1] if stream else ended.json)["headrace"]
            assert (label["epochs"], label["single_version"]) == ([2], True)
            first, last = made.prefill[0].requests
            assert first.body["cache_salt"] != last.body["cache_salt"]
            assert made.decode[0].requests[-1].handoff["remote_request_id"] == last.request_id
            assert [stub.refused for stub in made.engines] == [[], []]
            assert await made.metric("retries_total") == 0

    asyncio.run(case())


def test_a_readmitted_request_goes_ahead_of_those_that_came_after_it() -> None:
    async def case() -> None:
        async with bench(max_requests=1) as made:
            running = await _hold(made, prompt="first")
            later = made.start(prompt="second")
            await until(lambda: made.dispatcher.waiting == 1)
            assert (await made.command("/in_flight", {"mode": "readmit"})).status == 200
            made.decode[0].answers.set()
            await made.set_gate("open")
            assert [(await each).status for each in (running, later)] == [200, 200]
            assert [each.body["prompt"] for each in made.decode[0].requests] == ["first", "first", "second"]

    asyncio.run(case())


def test_readmit_takes_back_a_second_leg_that_waits_for_room() -> None:
    async def case() -> None:
        async with bench(fenced=True, max_legs_per_replica=1) as made:
            decode = made.decode[0]
            decode.answers.clear()
            both = [made.start(prompt="one")]
            await until(lambda: decode.open == 1)
            both.append(made.start(prompt="two"))
            await until(lambda: made.dispatcher.waiting == 1 and len(made.prefill[0].requests) == 2)
            await made.set_gate("holding")
            assert (await made.command("/in_flight", {"mode": "readmit"})).status == 200
            # Nothing made under the old weights is left to be sent, whatever room there is by now.
            await turns()
            assert (decode.open, len(decode.requests)) == (0, 1)
            await made.set_gate("frozen")
            decode.answers.set()
            await made.commit(2, "v2")
            await made.set_gate("open")
            answers = [await each for each in both]
            assert [(each.status, each.headers["x-headrace-epoch"]) for each in answers] == [(200, "2")] * 2
            assert len(made.prefill[0].requests) == 4

    asyncio.run(case())


def test_keep_lets_running_requests_live() -> None:
    async def case() -> None:
        async with bench(fenced=True) as made:
            running = await _hold(made, return_headrace=True)
            answer = await made.command("/in_flight", {"mode": "keep"})
            assert (answer.status, answer.json["requests"]) == (200, 1)
            decode = made.decode[0]
            assert (decode.open, decode.closed_early) == (1, 0)
            await made.set_gate("frozen")
            await made.commit(2, "v2")
            decode.answers.set()
            kept = await running
            assert (kept.status, len(decode.requests)) == (200, 1)
            # It lived through a change of weights.
            assert kept.json["headrace"]["single_version"] is False
            await made.set_gate("open")
            assert (await made.post(return_headrace=True)).json["headrace"]["single_version"] is True

    asyncio.run(case())


@pytest.mark.parametrize("body", [{}, {"mode": "kill"}, {"mode": "wait", "timeout_s": "long"}])
def test_a_command_that_says_nothing_known_is_refused(body: dict[str, Any]) -> None:
    async def case() -> None:
        async with bench(gate="holding") as made:
            answer = await made.command("/in_flight", body)
            assert (answer.status, answer.json["error"]["param"]) == (400, "mode")

    asyncio.run(case())
