"""What the server refuses, how long it waits, and how it stops, as raw sockets see it."""

from __future__ import annotations

import asyncio
import contextlib
import json
from typing import Any

import pytest

from router.io.http1 import server
from tests.integration.router.harness import until
from tests.integration.router.http1.harness import GET, POST, Held, Run, Served, both_loops, echo, served


def error_of(answer: bytes) -> tuple[int, Any]:
    """Status and error object of a refusal, which says that the connection closes."""
    head, _, body = answer.partition(b"\r\n\r\n")
    assert b"\r\nConnection: close" in head
    assert b"\r\nContent-Type: application/json" in head
    return int(head.split()[1]), json.loads(body)["error"]


@both_loops
@pytest.mark.parametrize("reads", [True, False])
def test_a_client_that_takes_nothing_of_its_reply_is_cut_off(run: Run, reads: bool) -> None:
    async def case() -> None:
        held, sent = Held(), 32 << 20  # more than the kernel keeps
        async with served(held, idle_timeout_s=1.0) as at:
            client = await at.client()
            await client.say(GET)
            await held.has(1)
            held.responders[0].start(200, ())
            held.responders[0].write(b"x" * sent)
            if reads:
                for _ in range(8):
                    await asyncio.sleep(0.2)
                    await client.reader.readexactly(sent // 8)
            await until(lambda: held.told == ["full", "writable" if reads else "gone"])

    run(case())


@both_loops
def test_the_body_is_asked_for_once_it_is_wanted(run: Run) -> None:
    async def case() -> None:
        async with served(echo, max_body_bytes=10) as at:
            client = await at.client()
            await client.say(POST + b"Expect: 100-continue\r\nContent-Length: 4\r\n\r\n")
            assert await client.hear(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
            await client.say(b"bo")
            await client.say(b"dy")
            assert (await client.reply())[1] == b"body"
            # A client that didn't wait isn't asked.
            await client.say(POST + b"Expect: 100-continue\r\nContent-Length: 4\r\n\r\nbody")
            assert (await client.reply())[0].startswith(b"HTTP/1.1 200 ")
            too_large = await at.ask(POST + b"Expect: 100-continue\r\nContent-Length: 11\r\n\r\n")
            assert error_of(too_large)[0] == 413
            assert error_of(await at.ask(POST + b"Expect: more\r\nContent-Length: 4\r\n\r\n"))[0] == 417

    run(case())


@both_loops
@pytest.mark.parametrize(
    ("raw", "status", "kind"),
    [
        (b"NONSENSE\r\n\r\n", 400, "BadRequestError"),
        (POST + b"Content-Length: 1\r\nTransfer-Encoding: chunked\r\n\r\n", 400, "BadRequestError"),
        (b"GET / HTTP/1.1\r\nHost: h\r\nX: " + b"x" * 20_000, 431, "RequestHeaderFieldsTooLargeError"),
        (POST + b"Content-Length: 1000001\r\n\r\n", 413, "RequestTooLargeError"),
        (POST + b"Transfer-Encoding: gzip, chunked\r\n\r\n", 501, "UnsupportedError"),
    ],
)
def test_what_is_refused_gets_an_error_and_is_counted(run: Run, raw: bytes, status: int, kind: str) -> None:
    async def case() -> None:
        held = Held()
        async with served(held) as at:
            answer = await at.ask(raw)
            got, error = error_of(answer)
            assert (got, error["code"], error["type"]) == (status, status, kind)
            assert at.refused == [status]
            assert held.requests == []

    run(case())


@both_loops
def test_a_refused_client_that_is_still_sending_can_read_why(run: Run) -> None:
    async def case() -> None:
        async with served(echo) as at:
            client = await at.client()
            await client.say(POST + b"Content-Length: 8000000\r\n\r\n")
            await client.say(b"x" * 8_000_000)
            assert error_of(await client.hear_all())[0] == 413
            client.writer.close()
            await until(lambda: at.server.connections == 0)

    run(case())


@both_loops
@pytest.mark.parametrize("bound", ["_LINGER_S", "_LINGER_BYTES"])
def test_a_refused_client_cannot_go_on_forever(run: Run, bound: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, bound, 0.2 if bound == "_LINGER_S" else 100_000)

    async def case() -> None:
        async with served(echo, idle_timeout_s=0.4) as at:
            client = await at.client()
            await client.say(b"NONSENSE\r\n\r\n")
            while at.server.connections:
                with contextlib.suppress(ConnectionError):
                    await client.say(b"x" * 1_000)
                await asyncio.sleep(0.001)

    run(case())


@both_loops
def test_a_chunked_body_is_cut_off_at_the_limit(run: Run) -> None:
    async def case() -> None:
        async with served(echo, max_body_bytes=100_000) as at:
            client = await at.client()
            await client.say(POST + b"Transfer-Encoding: chunked\r\n\r\n")
            for _ in range(20):
                await client.say(b"2710\r\n" + b"x" * 10_000 + b"\r\n")
            assert error_of(await client.hear_all())[0] == 413

    run(case())


@both_loops
@pytest.mark.parametrize("begun", [b"GET / HT", POST + b"Content-Length: 5\r\n\r\nab"])
def test_a_request_that_does_not_arrive_in_time(run: Run, begun: bytes) -> None:
    async def case() -> None:
        async with served(echo, header_timeout_s=0.2, body_timeout_s=0.2) as at:
            assert error_of(await at.ask(begun))[0] == 408
            assert at.refused == [408]

    run(case())


@both_loops
def test_a_head_has_one_time_limit_and_a_body_has_one_for_every_byte(run: Run) -> None:
    async def trickle(at: Served, data: bytes) -> bytes:
        client = await at.client()
        hearing = asyncio.create_task(client.hear_all())
        for each in data:
            if hearing.done():
                break
            await client.say(bytes([each]))
            await asyncio.sleep(0.05)
        return await hearing

    async def case() -> None:
        async with served(echo, header_timeout_s=0.4) as at:
            assert error_of(await trickle(at, b"GET /" + b"x" * 100))[0] == 408
        async with served(echo, header_timeout_s=0.4, body_timeout_s=0.8) as at:
            client = await at.client()
            await client.say(POST + b"Connection: close\r\nContent-Length: 24\r\n\r\n")
            for _ in range(24):
                await client.say(b"x")
                await asyncio.sleep(0.05)
            assert (await client.reply())[1] == b"x" * 24

    run(case())


@both_loops
def test_idle_connections_are_closed_without_a_word(run: Run) -> None:
    async def case() -> None:
        async with served(echo, header_timeout_s=0.2, idle_timeout_s=0.2) as at:
            assert await at.ask(b"") == b""
            client = await at.client()
            await client.say(GET)
            await client.reply()
            assert await client.hear_all() == b""
            assert at.refused == []

    run(case())


@both_loops
def test_an_open_request_has_no_time_limit_here(run: Run) -> None:
    async def case() -> None:
        held = Held()
        async with served(held, header_timeout_s=0.1, body_timeout_s=0.1, idle_timeout_s=0.1) as at:
            client = await at.client()
            await client.say(GET)
            await held.has(1)
            await asyncio.sleep(0.4)
            held.responders[0].reply(200, (), b"late")
            assert (await client.reply())[1] == b"late"

    run(case())


@both_loops
def test_draining_lets_open_requests_end_and_closes_the_rest(run: Run) -> None:
    async def case() -> None:
        held = Held()
        async with served(held) as at:
            idle, busy = await at.client(), await at.client()
            await busy.say(GET)
            await held.has(1)
            draining = asyncio.create_task(at.server.drain(60.0))
            assert await idle.hear_all() == b""
            with pytest.raises(ConnectionRefusedError):
                await at.client()
            held.responders[0].reply(200, (), b"done")
            assert (await busy.hear_all()).endswith(b"Connection: close\r\n\r\ndone")
            await draining
            assert at.server.connections == 0

    run(case())


@both_loops
def test_what_does_not_end_within_the_grace_is_cut_off(run: Run) -> None:
    async def case() -> None:
        held = Held()
        async with served(held) as at:
            client = await at.client()
            await client.say(GET)
            await held.has(1)
            held.responders[0].start(200, ())
            await at.server.drain(0.05)
            assert held.told == ["gone"]
            assert at.server.connections == 0
            assert not (await client.hear_all()).endswith(b"0\r\n\r\n")

    run(case())
