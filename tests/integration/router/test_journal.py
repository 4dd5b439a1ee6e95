"""Pins that outlive the router, in its journal of sessions."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from pathlib import Path

from router.main import running
from router.settings import EngineEndpoint, EngineRole
from tests.integration.router.harness import TOKEN, Bench, bench, make_settings, until


@asynccontextmanager
async def _next_router(made: Bench, journal: Path) -> AsyncIterator[Bench]:
    """Another router over the same engines, with the same journal; the first one has ended."""
    roles: list[tuple[EngineRole, list[str]]] = [
        ("prefill", [stub.name for stub in made.prefill]),
        ("decode", [stub.name for stub in made.decode]),
    ]
    urls = {stub.name: stub.url for stub in made.engines}
    engines = [EngineEndpoint(name=name, role=role, url=urls[name]) for role, names in roles for name in names]
    async with AsyncExitStack() as stack:
        router = await stack.enter_async_context(running(make_settings(engines, session_journal=str(journal)), TOKEN))
        again = replace(made, router=router)
        await again.commit(1, "v1")
        await until(lambda: all(again.is_usable(stub.name) for stub in again.engines))
        await again.set_gate("open")
        yield again


async def _pins(made: Bench, count: int) -> dict[str, tuple[str, str]]:
    pins = {}
    for number in range(count):
        answer = await made.post(session=f"s{number}")
        assert answer.status == 200
        pins[f"s{number}"] = (answer.prefill, answer.decode)
    return pins


def test_a_restarted_router_keeps_its_pins(tmp_path: Path) -> None:
    async def case() -> None:
        journal = tmp_path / "sessions.jsonl"
        async with bench(fenced=True, prefill=3, decode=3) as made:
            async with _next_router(made, journal) as first:
                before = await _pins(first, 7)
                await first.finish("s6")
            async with _next_router(made, journal) as second:
                assert await second.metric("active_sessions") == 12
                assert await _pins(second, 6) == {name: pins for name, pins in before.items() if name != "s6"}
                answer = await second.post(session="s0")
                assert answer.headers["x-headrace-choice"] == "prefill=pinned, decode=pinned"
                for number in range(6):
                    await second.finish(f"s{number}")
                assert await second.metric("active_sessions") == 0

    asyncio.run(case())


def test_a_journal_that_was_cut_off_costs_its_last_line(tmp_path: Path) -> None:
    async def case() -> None:
        journal = tmp_path / "sessions.jsonl"
        async with bench(prefill=2, decode=2) as made:
            async with _next_router(made, journal) as first:
                before = await _pins(first, 4)
            journal.write_bytes(journal.read_bytes() + b'{"id":"s0","pins":{"decode":{"repl')
            async with _next_router(made, journal) as second:
                assert await second.metric("active_sessions", role="decode") == 4
                assert await _pins(second, 4) == before

    asyncio.run(case())


def test_what_is_no_journal_at_all_is_passed_over(tmp_path: Path) -> None:
    async def case() -> None:
        journal = tmp_path / "sessions.jsonl"
        journal.write_bytes(b"\xff\xfe\n[1]\nnull\n" + b"[" * 5000 + b"\n\n")
        async with bench() as made, _next_router(made, journal) as again:
            assert await again.metric("active_sessions") == 0
            assert (await again.post(session="s")).status == 200

    asyncio.run(case())


def test_pins_to_another_life_of_an_engine_are_dropped(tmp_path: Path) -> None:
    async def case() -> None:
        journal = tmp_path / "sessions.jsonl"
        async with bench(fenced=True, decode=2) as made:
            async with _next_router(made, journal) as first:
                before = await _pins(first, 4)
            await made.decode[0].restart("decode-0.b")
            async with _next_router(made, journal) as second:
                lost = [name for name, (_, decode) in before.items() if decode == "decode-0"]
                assert len(lost) == 2
                assert await second.metric("active_sessions", replica="decode-0") == 0
                assert await second.metric("active_sessions", replica="decode-1") == 2
                answer = await second.post(session=lost[0])
                assert answer.headers["x-headrace-choice"] == "prefill=pinned, decode=new"

    asyncio.run(case())


def test_pins_to_a_replica_that_is_no_more_are_dropped(tmp_path: Path) -> None:
    async def case() -> None:
        journal = tmp_path / "sessions.jsonl"
        async with bench(decode=2) as made:
            async with _next_router(made, journal) as first:
                await _pins(first, 4)
            gone = made.decode.pop()
            async with _next_router(made, journal) as second:
                assert await second.metric("active_sessions", role="decode") == 2
                assert {decode for _, decode in (await _pins(second, 4)).values()} == {"decode-0"}
            await gone.stop()

    asyncio.run(case())
