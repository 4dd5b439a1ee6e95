"""The gate, moved by the internal port: what is sent, what waits, and when a move counts."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest

from tests.integration.router.harness import Answer, Bench, LeavingClient, bench, turns, until


async def _line_up(made: Bench, count: int) -> list[asyncio.Task[Answer]]:
    """Requests that wait, in the order of their arrival."""
    waiting: list[asyncio.Task[Answer]] = []
    for number in range(count):
        waiting.append(made.start(prompt=f"number {number}"))
        await until(lambda: made.dispatcher.waiting == len(waiting))
    return waiting


def test_a_router_starts_frozen_and_knows_no_weights() -> None:
    async def case() -> None:
        async with bench(committed=False, gate="frozen") as made:
            state = await made.state()
            assert (state["gate"], state["epochs"]) == ("frozen", {})
            ready = await made.get("/ready")
            assert (ready.status, "frozen" in ready.message) == (503, True)
            # Open, and still nothing is usable: no replica's weights are known.
            await made.set_gate("open")
            ready, answer = await made.get("/ready"), await made.post()
            assert (ready.status, answer.status, answer.headers["Retry-After"]) == (503, 503, "1")
            assert [stub.requests for stub in made.engines] == [[], []]
            await made.commit(1, "v1")
            await until(lambda: all(made.is_usable(stub.name) for stub in made.engines))
            assert (await made.get("/ready")).status == 200
            assert (await made.post()).status == 200

    asyncio.run(case())


@pytest.mark.parametrize("state", ["holding", "frozen"])
def test_a_closed_gate_keeps_new_requests_in_line(state: str) -> None:
    async def case() -> None:
        async with bench(gate=state) as made:
            waiting = await _line_up(made, 3)
            assert state in (await made.get("/ready")).message
            assert (await made.get("/health")).status == 200
            assert await made.metric("gate", state=state) == await made.metric("gate") == 1
            assert await made.metric("requests_waiting") == 3
            await turns()
            assert [stub.requests for stub in made.engines] == [[], []]
            await made.set_gate("open")
            assert [(await each).status for each in waiting] == [200] * 3
            assert await made.metric("requests_waiting") == 0

    asyncio.run(case())


def test_the_line_is_served_by_arrival() -> None:
    async def case() -> None:
        async with bench(gate="holding", max_requests=1) as made:
            waiting = await _line_up(made, 6)
            await made.set_gate("open")
            assert [(await each).status for each in waiting] == [200] * 6
            prompts = [each.body["prompt"] for each in made.decode[0].requests]
            assert prompts == [f"number {number}" for number in range(6)]

    asyncio.run(case())


def test_the_line_is_bounded() -> None:
    async def case() -> None:
        async with bench(gate="holding", max_waiting=2) as made:
            waiting = await _line_up(made, 2)
            for _ in range(3):
                answer = await made.post()
                assert (answer.status, answer.headers["Retry-After"]) == (503, "1")
                assert "holding" in answer.message
            await made.set_gate("open")
            assert [(await each).status for each in waiting] == [200] * 2

    asyncio.run(case())


def test_waiting_ends_after_a_time() -> None:
    async def case() -> None:
        async with bench(gate="holding", max_wait_s=0.3) as made:
            started = time.monotonic()
            answer = await made.post()
            assert 0.3 <= time.monotonic() - started < 3
            assert (answer.status, answer.headers["Retry-After"]) == (503, "1")
            assert "0.3 s" in answer.message
            assert made.dispatcher.waiting == 0
            await made.set_gate("open")
            assert (await made.post()).status == 200
            assert len(made.prefill[0].requests) == 1

    asyncio.run(case())


def test_who_leaves_the_line_is_never_sent() -> None:
    async def case() -> None:
        async with bench(gate="frozen") as made:
            client = await LeavingClient.sending(made)
            await until(lambda: made.dispatcher.waiting == 1)
            await client.leave()
            await until(lambda: made.dispatcher.waiting == 0)
            await made.set_gate("open")
            await turns()
            assert made.prefill[0].arrived == 0
            assert await made.metric("active_sessions") == 0

    asyncio.run(case())


def test_holding_lets_second_legs_go() -> None:
    async def case() -> None:
        async with bench() as made:
            made.prefill[0].answers.clear()
            running = made.start()
            await until(lambda: made.prefill[0].open == 1)
            await made.set_gate("holding")
            made.prefill[0].answers.set()
            answer = await running
            assert answer.status == 200
            assert len(made.decode[0].requests) == 1
            assert await made.metric("handoffs_total", outcome="sent") == 1

    asyncio.run(case())


def test_frozen_keeps_second_legs_back() -> None:
    async def case() -> None:
        async with bench() as made:
            made.prefill[0].answers.clear()
            running = made.start()
            await until(lambda: made.prefill[0].open == 1)
            await made.set_gate("frozen")
            made.prefill[0].answers.set()
            await until(lambda: made.dispatcher.waiting == 1)
            await turns()
            assert made.decode[0].arrived == 0
            await made.set_gate("holding")
            assert (await running).status == 200
            assert (len(made.prefill[0].requests), len(made.decode[0].requests)) == (1, 1)

    asyncio.run(case())


@pytest.mark.parametrize("role", ["prefill", "decode"])
@pytest.mark.parametrize("state", ["holding", "frozen"])
def test_a_hold_counts_when_engines_have_what_was_sent(role: str, state: str) -> None:
    async def case() -> None:
        async with bench(fenced=True) as made:
            engine = getattr(made, role)[0]
            engine.accepts.clear()
            engine.answers.clear()
            running = made.start()
            await until(lambda: engine.arrived == 1)
            holding = asyncio.create_task(made.command("/gate", {"gate": state}))
            await turns()
            assert not holding.done()
            engine.accepts.set()
            answer = await holding
            assert (answer.status, answer.json) == (200, {"gate": state, "running": 1, "waiting": 0})
            assert not running.done()
            engine.answers.set()
            await made.set_gate("open")
            assert (await running).status == 200

    asyncio.run(case())


def test_a_hold_that_engines_do_not_confirm_says_so() -> None:
    async def case() -> None:
        async with bench(fenced=True) as made:
            made.decode[0].accepts.clear()
            running = made.start()
            await until(lambda: made.decode[0].arrived == 1)
            answer = await made.command("/gate", {"gate": "holding", "timeout_s": 0.1})
            assert (answer.status, answer.json["error"]["param"]) == (409, "timeout_s")
            assert made.prefill[0].requests[0].request_id in answer.message
            assert (await made.state())["gate"] == "holding"
            made.decode[0].accepts.set()
            assert (await made.command("/gate", {"gate": "holding"})).status == 200
            assert (await running).status == 200

    asyncio.run(case())


def test_a_hold_takes_engines_without_a_fence_at_their_sockets_word() -> None:
    async def case() -> None:
        async with bench() as made:
            made.decode[0].accepts.clear()
            running = made.start()
            await until(lambda: made.decode[0].arrived == 1)
            answer = await made.command("/gate", {"gate": "holding"})
            assert (answer.status, answer.json["running"]) == (200, 1)
            made.decode[0].accepts.set()
            assert (await running).status == 200

    asyncio.run(case())


COMMANDS: list[tuple[str, str, dict[str, Any]]] = [
    ("POST", "/gate", {"gate": "open"}),
    ("POST", "/epochs", {"epoch": 1, "version": "v1"}),
    ("POST", "/in_flight", {"mode": "wait"}),
    ("POST", "/replicas", {"name": "new", "role": "decode", "url": "http://127.0.0.1:9"}),
    ("POST", "/replicas/decode-0/drain", {"draining": True}),
    ("DELETE", "/replicas/decode-0", {}),
]


@pytest.mark.parametrize(("method", "path", "body"), COMMANDS, ids=[" ".join(each[:2]) for each in COMMANDS])
def test_a_command_older_than_another_is_refused(method: str, path: str, body: dict[str, Any]) -> None:
    async def case() -> None:
        async with bench() as made:
            newest = {"update": 3, "attempt": 2, "step": 5}
            assert (await made.command("/gate", {"gate": "holding", **newest})).status == 200
            for older in ({"step": 4}, {"attempt": 1, "step": 9}, {"update": 2, "attempt": 9, "step": 9}):
                answer = await made.command(path, {**body, **newest, **older}, method)
                assert (answer.status, answer.json["error"]["param"]) == (409, "update")
            state = await made.state()
            assert (state["gate"], state["order"]) == ("holding", [3, 2, 5])
            assert [each["name"] for each in state["replicas"]] == ["prefill-0", "decode-0"]
            assert not any(each["draining"] for each in state["replicas"])
            # The same again is a repetition, and welcome.
            assert (await made.command(path, {**body, **newest}, method)).status == 200

    asyncio.run(case())
