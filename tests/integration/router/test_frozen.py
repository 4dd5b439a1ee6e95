"""A frozen gate: nothing is sent to engines, and nothing closed (field case A27)."""

from __future__ import annotations

import asyncio
import time

import pytest

from tests.fakes.stub_engine import StubEngine
from tests.integration.router.harness import Bench, LeavingClient, bench, turns, until


async def _freeze(made: Bench) -> None:
    await made.set_gate("frozen")
    for stub in made.engines:
        assert stub.fence is not None
        stub.fence.pause_received()


async def _thaw(made: Bench) -> float:
    for stub in made.engines:
        assert stub.fence is not None
        stub.fence.resumed(stub.fence.pauses)
    thawed = time.monotonic()
    await made.set_gate("open")
    return thawed


async def _closes_only_after(made: Bench, engine: StubEngine, count: int) -> None:
    """The engine's requests stay open until the gate thaws, and end within 1 s then."""
    await turns()
    assert (engine.open, engine.closed_early) == (count, 0)
    thawed = await _thaw(made)
    await until(lambda: engine.open == 0)
    assert time.monotonic() - thawed < 1.0
    assert (engine.closed_early, engine.closed_in_pause) == (count, 0)
    await until(lambda: made.dispatcher.admitted == 0)
    assert await made.metric("legs_in_flight") == await made.metric("active_sessions") == 0


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_a27_clients_that_leave_close_nothing_before_the_gate_thaws(role: str) -> None:
    async def case() -> None:
        async with bench(fenced=True) as made:
            engine = getattr(made, role)[0]
            engine.answers.clear()
            clients = [await LeavingClient.sending(made) for _ in range(3)]
            await until(lambda: engine.open == 3)
            await _freeze(made)
            for client in clients:
                await client.leave()
            await made.metric_reaches(3, "client_gone_total")
            await _closes_only_after(made, engine, 3)
            assert len(made.decode[0].requests) == (3 if role == "decode" else 0)

    asyncio.run(case())


def test_a27_a_hold_that_keeps_what_runs_closes_nothing_either() -> None:
    """Prefill engines pause before the gate is frozen: the second legs of others go meanwhile."""

    async def case() -> None:
        async with bench(fenced=True) as made:
            prefill = made.prefill[0]
            prefill.answers.clear()
            client = await LeavingClient.sending(made)
            await until(lambda: prefill.open == 1)
            await made.set_gate("holding")
            assert (await made.command("/in_flight", {"mode": "keep"})).status == 200
            assert prefill.fence is not None
            prefill.fence.pause_received()
            await client.leave()
            await made.metric_reaches(1, "client_gone_total")
            await _closes_only_after(made, prefill, 1)

    asyncio.run(case())


def test_a27_a_stream_whose_client_leaves_runs_on_until_the_gate_thaws() -> None:
    async def case() -> None:
        async with bench(fenced=True) as made:
            decode = made.decode[0]
            decode.tokens, decode.token_s = ["t" * 1000] * 1000, 0.01
            client = await LeavingClient.sending(made, stream=True)
            await until(lambda: len(decode.sent_at) > 3)
            await _freeze(made)
            await client.leave()
            await made.metric_reaches(1, "client_gone_total")
            sent = len(decode.sent_at)
            await until(lambda: len(decode.sent_at) > sent + 5)
            await _closes_only_after(made, decode, 1)

    asyncio.run(case())


def test_a27_a_leg_that_ends_by_itself_while_frozen_leaves_nothing_behind() -> None:
    async def case() -> None:
        async with bench(fenced=True) as made:
            decode = made.decode[0]
            decode.answers.clear()
            client = await LeavingClient.sending(made)
            await until(lambda: decode.open == 1)
            await made.set_gate("frozen")
            await client.leave()
            await made.metric_reaches(1, "client_gone_total")
            decode.answers.set()
            await until(lambda: decode.open == 0)
            await until(lambda: made.dispatcher.admitted == 0)
            assert decode.closed_early == 0
            await made.set_gate("open")
            assert (await made.post()).status == 200

    asyncio.run(case())


def test_a27_a_request_that_runs_out_of_time_is_answered_and_not_closed() -> None:
    async def case() -> None:
        async with bench(fenced=True, request_timeout_s=0.5) as made:
            decode = made.decode[0]
            decode.answers.clear()
            running = made.start()
            await until(lambda: decode.open == 1)
            await _freeze(made)
            assert (await running).status == 504
            await _closes_only_after(made, decode, 1)

    asyncio.run(case())


def test_a27_a_slow_leg_is_not_given_up_while_frozen() -> None:
    async def case() -> None:
        async with bench(fenced=True, leg_timeout_s=0.3, retries=1) as made:
            decode = made.decode[0]
            decode.answers.clear()
            running = made.start()
            await until(lambda: decode.open == 1)
            await _freeze(made)
            await asyncio.sleep(0.5)
            assert (decode.open, decode.closed_early) == (1, 0)
            decode.answers.set()
            assert (await running).status == 200
            assert len(decode.requests) == 1

    asyncio.run(case())


def test_a27_an_abort_by_id_is_answered_and_not_closed() -> None:
    async def case() -> None:
        async with bench(fenced=True) as made:
            decode = made.decode[0]
            decode.answers.clear()
            running = made.start(request_id="r")
            await until(lambda: decode.open == 1)
            await _freeze(made)
            assert (await made.post("/abort_requests", {"request_id": "r"})).status == 200
            assert (await running).status == 499
            await _closes_only_after(made, decode, 1)

    asyncio.run(case())


def test_a27_a_replica_that_falls_silent_while_frozen_keeps_its_legs() -> None:
    async def case() -> None:
        async with bench(fenced=True, silence_limit_s=0.1, retries=0) as made:
            decode = made.decode[0]
            decode.answers.clear()
            running = made.start()
            await until(lambda: decode.open == 1)
            await _freeze(made)
            decode.lives.clear()
            await until(lambda: not made.is_usable(decode.name))
            await turns()
            assert (decode.open, decode.closed_early) == (1, 0)
            decode.lives.set()
            decode.answers.set()
            assert (await running).status == 200
            await _thaw(made)

    asyncio.run(case())


def test_what_is_asked_of_any_engine_is_not_asked_while_frozen() -> None:
    async def case() -> None:
        async with bench(gate="frozen") as made:
            for answer in (await made.get("/v1/models"), await made.post("/tokenize", {"prompt": "x"})):
                assert (answer.status, answer.headers["Retry-After"]) == (503, "1")
            assert [stub.asked for stub in made.engines] == [[], []]
            await made.set_gate("holding")
            assert (await made.get("/v1/models")).status == 200

    asyncio.run(case())
