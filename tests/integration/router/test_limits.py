"""Limits on what is taken on and on what is held in memory."""

from __future__ import annotations

import asyncio
import json
import os

import aiohttp
import pytest

from tests.integration.router.harness import COMPLETIONS, LeavingClient, bench, turns, until

PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


def _resident_bytes() -> int:
    with open("/proc/self/statm") as file:  # noqa: PTH123
        return int(file.read().split()[1]) * PAGE_BYTES


def test_a_body_over_the_limit_is_413() -> None:
    async def case() -> None:
        async with bench(max_body_bytes=2000) as made:
            large = await made.post(prompt="x" * 3000)
            assert (large.status, large.json["error"]["code"]) == (413, 413)
            assert (await made.post(prompt="x" * 1900)).status == 200
            assert len(made.prefill[0].requests) == 1
            assert await made.metric("requests_total", code="413") == 1

    asyncio.run(case())


def test_a_body_without_a_length_is_cut_off_at_the_limit() -> None:
    async def case() -> None:
        async with bench(max_body_bytes=2000) as made:
            reader, writer = await asyncio.open_connection("127.0.0.1", made.router.port)
            writer.write(f"POST {COMPLETIONS} HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n".encode())
            for _ in range(4):
                writer.write(b"3e8\r\n" + b"x" * 1000 + b"\r\n")
            assert (await reader.readline()).split()[1] == b"413"
            writer.close()
            await writer.wait_closed()
            assert made.prefill[0].arrived == 0

    asyncio.run(case())


def test_a_large_body_within_the_limit_arrives_whole() -> None:
    async def case() -> None:
        async with bench() as made:
            prompt = list(range(100_000))
            assert (await made.post(prompt=prompt)).status == 200
            assert made.prefill[0].requests[0].body["prompt"] == prompt
            assert made.decode[0].requests[0].body["prompt"] == prompt

    asyncio.run(case())


def test_requests_beyond_the_total_wait_in_the_order_of_their_arrival() -> None:
    async def case() -> None:
        async with bench(max_requests=2) as made:
            decode = made.decode[0]
            decode.answers.clear()
            running = []
            for number in range(6):
                running.append(made.start(prompt=f"number {number}"))
                await until(lambda: made.dispatcher.admitted + made.dispatcher.waiting == len(running))
            await until(lambda: decode.open == 2)
            assert (made.dispatcher.admitted, made.dispatcher.waiting) == (2, 4)
            assert len(made.prefill[0].requests) == 2
            assert await made.metric("requests_admitted") == 2
            decode.answers.set()
            assert [(await each).status for each in running] == [200] * 6
            firsts = [each.body["prompt"] for each in made.prefill[0].requests]
            assert sorted(firsts[:2]) == ["number 0", "number 1"]
            assert sorted(firsts[2:4]) == ["number 2", "number 3"]

    asyncio.run(case())


def test_a_replica_takes_so_many_legs() -> None:
    async def case() -> None:
        async with bench(decode=2, max_legs_per_replica=2) as made:
            most = [0, 0]

            for stub in made.decode:
                stub.latency_s = 0.02

            async def watch() -> None:
                while True:
                    for at, stub in enumerate(made.decode):
                        most[at] = max(most[at], stub.open)
                    await asyncio.sleep(0.002)

            watching = asyncio.create_task(watch())
            answers = await asyncio.gather(*(made.post() for _ in range(20)))
            watching.cancel()
            assert {each.status for each in answers} == {200}
            assert most == [2, 2]
            assert await made.metric("legs_in_flight") == 0

    asyncio.run(case())


def test_a_pinned_session_moves_where_there_is_room() -> None:
    async def case() -> None:
        async with bench(decode=2, max_legs_per_replica=1) as made:
            first = made.decode[0]
            assert (await made.post(session="s")).decode == first.name
            first.answers.clear()
            busy = made.start(session="s")
            await until(lambda: first.open == 1)
            answer = await made.post(session="s")
            assert (answer.decode, "decode=moved_full" in answer.headers["x-headrace-choice"]) == ("decode-1", True)
            first.answers.set()
            assert (await busy).status == 200

    asyncio.run(case())


@pytest.mark.parametrize("leaves", [False, True])
def test_a_slow_reader_stops_its_engine_and_not_the_memory(leaves: bool) -> None:
    async def case() -> None:
        async with bench() as made:
            decode = made.decode[0]
            token, count = "x" * 250_000, 400
            decode.tokens = [token] * count
            before = _resident_bytes()
            slow = await LeavingClient.sending(made, stream=True)
            await until(lambda: len(decode.sent_at) > 0)
            sent = -1
            while sent != len(decode.sent_at):
                sent = len(decode.sent_at)
                await turns(40)
            # What stands between them is bounded: sockets and a few buffers, whatever the stream's length.
            assert sent * len(token) < 30_000_000
            assert _resident_bytes() - before < 60_000_000
            assert (await made.get("/health")).status == 200
            assert decode.open == 1
            if leaves:
                await slow.leave()
                await until(lambda: decode.open == 0)
                assert decode.closed_early == 1
            else:
                taken = 0
                async with asyncio.timeout(30):
                    while taken < count * len(token):
                        taken += len(await slow.reader.read(1 << 20))
                await until(lambda: decode.open == 0)
                assert decode.closed_early == 0
                await slow.leave()
            await until(lambda: made.dispatcher.admitted == 0)

    asyncio.run(case())


def test_a_slow_reader_does_not_slow_the_others() -> None:
    async def case() -> None:
        async with bench() as made:
            decode = made.decode[0]
            decode.tokens = ["x" * 1_000_000] * 60
            slow = await LeavingClient.sending(made, stream=True)
            await until(lambda: len(decode.sent_at) > 0)
            decode.tokens = ["a", "b"]
            for _ in range(5):
                answer = await made.post(stream=True)
                assert [each["choices"][0]["text"] for each in answer.events] == ["a", "b"]
            await slow.leave()

    asyncio.run(case())


def test_a_client_that_does_not_end_its_head_is_cut_off() -> None:
    async def case() -> None:
        async with bench(header_timeout_s=0.2) as made:
            reader, writer = await asyncio.open_connection("127.0.0.1", made.router.port)
            writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\n")
            assert (await reader.readline()).split()[1] == b"408"
            writer.close()
            await writer.wait_closed()

    asyncio.run(case())


def test_a_header_over_the_limit_is_431() -> None:
    async def case() -> None:
        async with bench(max_header_bytes=2000) as made:
            answer = await made.get("/health")
            assert answer.status == 200
            async with made.client.get(made.url + "/health", headers={"x-long": "x" * 3000}) as reply:
                assert reply.status == 431
                assert (await reply.json())["error"]["code"] == 431

    asyncio.run(case())


def test_an_idle_connection_is_closed() -> None:
    async def case() -> None:
        async with bench(idle_timeout_s=0.2) as made:
            reader, writer = await asyncio.open_connection("127.0.0.1", made.router.port)
            writer.write(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
            assert (await reader.readuntil(b'"alive"}')).startswith(b"HTTP/1.1 200")
            assert await asyncio.wait_for(reader.read(), 5) == b""
            writer.close()
            await writer.wait_closed()

    asyncio.run(case())


def test_a_body_in_another_encoding_is_no_json() -> None:
    async def case() -> None:
        async with bench() as made, aiohttp.ClientSession() as client:
            data = json.dumps({"prompt": "hello"}).encode("utf-16")
            async with client.post(made.url + COMPLETIONS, data=data) as reply:
                assert reply.status == 400
            headers = {"Content-Encoding": "gzip"}
            async with client.post(made.url + COMPLETIONS, data=b"\x1f\x8babc", headers=headers) as reply:
                assert reply.status == 400
                assert (await reply.json())["error"]["code"] == 400
            assert made.prefill[0].arrived == 0

    asyncio.run(case())
