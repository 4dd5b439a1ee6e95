"""Load, sessions and clients that leave, over real HTTP (field cases A08, A09, A11, A12)."""

from __future__ import annotations

import asyncio
import json
import time
from collections import Counter
from collections.abc import Callable

import aiohttp
import pytest

from tests.integration.router.harness import COMPLETIONS, Bench, bench, until


async def _leave_when(made: Bench, condition: Callable[[], bool], **fields: object) -> float:
    """Send a request and close its connection once the condition holds; when it was closed."""
    reader, writer = await asyncio.open_connection("127.0.0.1", made.router.port)
    body = json.dumps({"prompt": "hello", **fields}).encode()
    head = f"POST {COMPLETIONS} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
    writer.write(head.encode() + body)
    await writer.drain()
    await until(condition)
    writer.close()
    await writer.wait_closed()
    del reader
    return time.monotonic()


def test_a08_a_streaming_replica_counts_as_busy_to_the_last_byte() -> None:
    async def case() -> None:
        async with bench(decode=2) as made:
            busy, idle = made.decode
            busy.first_token_s, busy.token_s = 0.3, 0.3
            data = json.dumps({"prompt": "hello", "stream": True}).encode()
            headers = {"x-session-id": "long"}
            async with made.client.post(made.url + COMPLETIONS, data=data, headers=headers) as reply:
                first = await reply.content.readline()
                assert time.monotonic() - busy.sent_at[0] < 0.2
                assert first.startswith(b"data: ")
                assert await made.metric("legs_in_flight", replica=busy.name) == 1
                assert await made.metric("tokens_in_flight", replica=busy.name) > 0
                other = await made.post(session="new")
                assert other.headers["x-headrace-decode"] == idle.name
                assert await made.metric("legs_in_flight", replica=busy.name) == 1
                await reply.read()
            ended = time.monotonic()
            while await made.metric("legs_in_flight", replica=busy.name):
                assert time.monotonic() - ended < 0.1
            assert await made.metric("legs_in_flight") == await made.metric("tokens_in_flight") == 0

    asyncio.run(case())


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("silence", ["before the headers", "between tokens"])
def test_a09_a_client_that_leaves_a_silent_engine(stream: bool, silence: str) -> None:
    async def case() -> None:
        async with bench() as made:
            decode = made.decode[0]
            if silence == "before the headers":
                decode.silent = True
            else:
                decode.token_s = 30.0
            left = await _leave_when(made, lambda: decode.open == 1, stream=stream)
            await until(lambda: decode.open == 0)
            assert time.monotonic() - left < 1.0
            assert decode.closed_early == 1
            assert await made.metric("legs_in_flight") == await made.metric("active_sessions") == 0
            assert await made.metric("client_gone_total") == 1

    asyncio.run(case())


def test_a09_no_decode_leg_after_a_client_that_left() -> None:
    async def case() -> None:
        async with bench() as made:
            made.prefill[0].silent = True
            await _leave_when(made, lambda: made.prefill[0].open == 1)
            await until(lambda: made.prefill[0].open == 0, 1.0)
            assert await made.metric("legs_in_flight") == await made.metric("active_sessions") == 0
            assert await made.metric("legs_total", role="prefill", outcome="cancelled") == 1
            assert len(made.prefill[0].requests) == 1
            assert made.decode[0].requests == []

    asyncio.run(case())


def test_a11_serial_sessions_spread_evenly() -> None:
    async def case() -> None:
        async with bench(prefill=4, decode=4) as made:
            for number in range(8):
                assert (await made.post(session=f"s{number}")).status == 200
                await made.finish(f"s{number}")
            for stubs in (made.prefill, made.decode):
                assert [len(stub.requests) for stub in stubs] == [2, 2, 2, 2]

    asyncio.run(case())


def test_a_session_stays_and_requests_without_one_spread() -> None:
    async def case() -> None:
        async with bench(prefill=2, decode=3) as made:
            replies = [await made.post(session="s") for _ in range(4)]
            assert (
                len({(each.headers["x-headrace-prefill"], each.headers["x-headrace-decode"]) for each in replies}) == 1
            )
            in_body = await made.post(session_id="s")
            assert in_body.headers["x-headrace-decode"] == replies[0].headers["x-headrace-decode"]
            spread = Counter([(await made.post()).headers["x-headrace-decode"] for _ in range(6)])
            assert spread == {
                stub.name: 3 for stub in made.decode if stub.name != replies[0].headers["x-headrace-decode"]
            }

    asyncio.run(case())


def test_a12_every_end_releases_its_session() -> None:
    async def case() -> None:
        async with bench(prefill=2, decode=2) as made:
            for number in range(4):
                assert (await made.post(session=f"normal{number}")).status == 200
            for stub in made.decode:
                stub.status = 400
            for number in range(3):
                assert (await made.post(session=f"error{number}")).status == 400
            for stub in made.decode:
                stub.status, stub.silent = 200, True
            for number in range(3):
                before = sum(stub.closed_early for stub in made.decode)
                await _leave_when(made, lambda: any(stub.open for stub in made.decode), session_id=f"abort{number}")
                await until(lambda before=before: sum(stub.closed_early for stub in made.decode) > before)
            assert await made.metric("active_sessions", role="decode") == 10
            names = [
                f"{kind}{number}"
                for kind, count in (("normal", 4), ("error", 3), ("abort", 3))
                for number in range(count)
            ]
            for name in names * 2:
                answer = await made.finish(name)
                assert (answer.status, answer.json["session_id"]) == (200, name)
            assert await made.metric("active_sessions") == 0

    asyncio.run(case())


def test_a12_an_unfinished_session_expires_but_not_during_a_request() -> None:
    async def case() -> None:
        policy = {"type": "sticky_least_loaded", "session_idle_s": 0.3}
        async with bench(policy=policy, probe_interval_s=0.05) as made:
            made.decode[0].latency_s = 0.8
            running = asyncio.create_task(made.post(session="s"))
            await until(lambda: made.decode[0].open == 1)
            await asyncio.sleep(0.5)
            assert await made.metric("active_sessions", role="decode") == 1
            await running
            assert await made.metric("active_sessions", role="decode") == 1
            await until(lambda: len(made.router.services.fleet.sessions) == 0)
            assert await made.metric("active_sessions") == 0

    asyncio.run(case())


def test_a12_a_dead_replicas_sessions_move_and_stay() -> None:
    async def case() -> None:
        async with bench(decode=2) as made:
            dead = (await made.post(session="s")).headers["x-headrace-decode"]
            await next(stub for stub in made.decode if stub.name == dead).stop()
            moved = [await made.post(session="s") for _ in range(3)]
            assert [each.status for each in moved] == [200] * 3
            assert {each.headers["x-headrace-decode"] for each in moved} == {"decode-0", "decode-1"} - {dead}
            assert await made.metric("active_sessions", replica=dead) == 0

    asyncio.run(case())


def test_a_relay_is_not_stuck_behind_a_client_that_reads_slowly() -> None:
    async def case() -> None:
        async with bench() as made:
            made.decode[0].tokens = ["x" * 1_000_000] * 60
            data = json.dumps({"prompt": "hello", "stream": True}).encode()
            timeout = aiohttp.ClientTimeout(total=30)
            async with made.client.post(made.url + COMPLETIONS, data=data, timeout=timeout) as reply:
                await asyncio.sleep(0.3)
                sent = len(made.decode[0].sent_at)
                assert (await made.get("/health")).status == 200
                assert len(await reply.read()) > 60 * 1_000_000
            assert sent < 60

    asyncio.run(case())
