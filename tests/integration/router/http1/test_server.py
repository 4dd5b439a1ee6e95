"""Requests and replies of the server as raw sockets see them."""

from __future__ import annotations

import asyncio
import json
import socket
import time
from email.utils import parsedate_to_datetime

import pytest

from router.io.http1.server import Request, Responder
from tests.integration.router.harness import until
from tests.integration.router.http1.harness import GET, GET_AND_CLOSE, POST, Held, Run, both_loops, echo, served


@both_loops
def test_a_connection_serves_request_after_request(run: Run) -> None:
    async def case() -> None:
        async with served(echo) as at:
            client = await at.client()
            for size in (0, 1, 5_000, 300_000):
                await client.say(b"POST /x HTTP/1.1\r\nHost: h\r\nContent-Length: %d\r\n\r\n" % size + b"b" * size)
                head, body = await client.reply()
                assert head == b"HTTP/1.1 200 OK\r\nX-Path: /x\r\nContent-Length: %d\r\n\r\n" % size
                assert body == b"b" * size
            assert at.server.connections == 1

    run(case())


@both_loops
def test_pipelined_requests_are_answered_one_at_a_time_in_order(run: Run) -> None:
    async def case() -> None:
        held = Held()
        async with served(held) as at:
            client = await at.client()
            await client.say(b"".join(b"GET /%d HTTP/1.1\r\nHost: h\r\n\r\n" % number for number in range(20)))
            for number in range(20):
                await held.has(number + 1)
                assert [each.path for each in held.requests] == [f"/{each}" for each in range(number + 1)]
                held.responders[number].reply(200, (), b"%d" % number)
                assert await client.reply() == (b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(str(number)),
                                                b"%d" % number)  # fmt: skip
            assert held.told == []

    run(case())


@both_loops
def test_no_byte_of_a_long_pipeline_is_lost(run: Run) -> None:
    async def case() -> None:
        served_bodies: list[bytes] = []

        def soon(request: Request, responder: Responder) -> None:
            served_bodies.append(request.body)
            asyncio.get_running_loop().call_soon(responder.reply, 200, (), b"")

        async with served(soon) as at:
            bodies = [b"%d" % number * 3_000 for number in range(200)]
            raw = b"".join(POST + b"Content-Length: %d\r\n\r\n" % len(body) + body for body in bodies)
            answer = await at.ask(raw + GET_AND_CLOSE)
            assert answer.count(b"HTTP/1.1 200 OK\r\n") == 201
            assert served_bodies == [*bodies, b""]

    run(case())


@both_loops
def test_http_1_0_gets_replies_it_understands(run: Run) -> None:
    def stream(request: Request, responder: Responder) -> None:
        if request.path == "/whole":
            responder.reply(200, (), b"whole")
            return
        responder.start(200, ())
        responder.write(b"one")
        responder.write(b"two")
        responder.end()

    async def case() -> None:
        async with served(stream) as at:
            assert (await at.ask(b"GET /whole HTTP/1.0\r\n\r\n")).endswith(b"Connection: close\r\n\r\nwhole")
            assert await at.ask(b"GET / HTTP/1.0\r\n\r\n") == b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\nonetwo"
            client = await at.client()
            await client.say(b"GET /whole HTTP/1.0\r\nConnection: keep-alive\r\n\r\n" * 2)
            for _ in range(2):
                head, body = await client.reply()
                assert b"\r\nConnection: keep-alive\r\n" in head
                assert body == b"whole"

    run(case())


@both_loops
def test_a_streamed_reply_is_chunked(run: Run) -> None:
    def stream(_request: Request, responder: Responder) -> None:
        responder.start(200, (("Content-Type", "text/event-stream"),))
        for piece in (b"abc", b"", b"x" * 100_000):
            responder.write(piece)
        responder.end()

    async def case() -> None:
        async with served(stream) as at:
            client = await at.client()
            for _ in range(2):
                await client.say(GET)
                head = await client.hear(b"\r\n\r\n")
                assert head == (
                    b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
                )
                assert (
                    await client.hear(b"\r\n0\r\n\r\n") == b"3\r\nabc\r\n186a0\r\n" + b"x" * 100_000 + b"\r\n0\r\n\r\n"
                )

    run(case())


@both_loops
def test_every_reply_says_when_it_was_made(run: Run) -> None:
    async def case() -> None:
        async with served(echo, header_timeout_s=0.1) as at:
            said = []
            for raw in (GET_AND_CLOSE, b"nonsense\r\n\r\n"):
                client = await at.client()
                await client.say(raw)
                reply = await client.reader.read()
                (line,) = [line for line in reply.split(b"\r\n") if line.startswith(b"Date: ")]
                said.append(parsedate_to_datetime(line[6:].decode()))
            assert all(abs(time.time() - each.timestamp()) < 60 for each in said)
            await until(lambda: parsedate_to_datetime(at.server.date_line[6:]) > max(said))

    run(case())


@both_loops
def test_replies_without_a_body(run: Run) -> None:
    def reply(request: Request, responder: Responder) -> None:
        if request.path == "/stream":
            responder.start(200, ())
            responder.write(b"body")
            responder.end()
        else:
            responder.reply(204 if request.path == "/nothing" else 200, (), b"body")

    async def case() -> None:
        async with served(reply) as at:
            asked = (b"HEAD /", b"HEAD /stream", b"GET /nothing")
            raw = b"".join(b"%b HTTP/1.1\r\nHost: h\r\n\r\n" % each for each in asked)
            assert await at.ask(raw + GET_AND_CLOSE) == (
                b"HTTP/1.1 200 OK\r\nContent-Length: 4\r\n\r\n"
                b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
                b"HTTP/1.1 204 No Content\r\n\r\n"
                b"HTTP/1.1 200 OK\r\nContent-Length: 4\r\nConnection: close\r\n\r\nbody"
            )

    run(case())


@both_loops
@pytest.mark.parametrize("how", ["close", "half-close", "reset"])
@pytest.mark.parametrize("streaming", [False, True])
def test_a_client_that_leaves_is_noticed_while_nothing_is_sent(run: Run, how: str, streaming: bool) -> None:
    async def case() -> None:
        held = Held()
        async with served(held) as at:
            client = await at.client()
            # Some bytes of a next request don't keep the server from looking.
            await client.say(GET + b"GET /next HT")
            await held.has(1)
            if streaming:
                held.responders[0].start(200, ())
                held.responders[0].write(b"piece")
                await client.hear(b"piece\r\n")
            if how == "close":
                client.writer.close()
            elif how == "half-close":
                client.writer.write_eof()
            else:
                client.reset()
            await until(lambda: held.told == ["gone"])
            responder = held.responders[0]
            if not streaming:
                responder.start(200, ())
            responder.write(b"more")
            responder.end()
            await until(lambda: at.server.connections == 0)
            assert held.told == ["gone"]

    run(case())


@both_loops
def test_nobody_is_told_of_a_client_that_leaves_after_its_reply(run: Run) -> None:
    async def case() -> None:
        held = Held()
        async with served(held) as at:
            client = await at.client()
            await client.say(GET)
            await held.has(1)
            held.responders[0].reply(200, (), b"")
            await client.reply()
            client.writer.close()
            await until(lambda: at.server.connections == 0)
            assert held.told == []

    run(case())


@both_loops
def test_a_slow_reader_is_told_of_and_caught_up_with(run: Run) -> None:
    async def case() -> None:
        held = Held()
        async with served(held) as at:
            client = await at.client(read_ahead=1024)
            await client.say(GET + GET)
            await held.has(1)
            responder = held.responders[0]
            responder.start(200, ())
            written = 0
            while responder.writable:
                responder.write(b"x" * 10_000)
                written += 10_000
                await asyncio.sleep(0)
            assert held.told == ["full"]
            responder.end()
            assert len(held.requests) == 1, "a second request while the first reply waits to be read"
            received = 0
            while received < written:
                async with asyncio.timeout(10):
                    received += len(await client.reader.read(65536))
            await held.has(2)
            assert held.responders[1].writable

    run(case())


@both_loops
def test_offers_of_other_protocols_are_not_taken(run: Run) -> None:
    async def case() -> None:
        async with served(echo) as at:
            for offered in (b"h2c", b"websocket"):
                head = POST + b"Connection: Upgrade\r\nUpgrade: %b\r\nContent-Length: 4\r\n\r\n" % offered
                assert (await at.ask(head + b"body" + GET_AND_CLOSE)).startswith(b"HTTP/1.1 200 OK\r\n")

    run(case())


@both_loops
def test_an_application_that_fails(run: Run, caplog: pytest.LogCaptureFixture) -> None:
    def failing(request: Request, responder: Responder) -> None:
        if request.path == "/injected":
            responder.reply(200, (("X", request.query + "\r\nEvil: 1"),), b"")
        if request.path == "/cyrillic":
            responder.reply(200, (("X", "\u0416"),), b"")
        if request.path == "/late":
            responder.start(200, ())
        raise ValueError("a bug")

    async def case() -> None:
        async with served(failing) as at:
            client = await at.client()
            for path in (b"/", b"/injected", b"/cyrillic"):
                await client.say(b"GET %b HTTP/1.1\r\nHost: h\r\n\r\n" % path)
                head, body = await client.reply()
                assert head.startswith(b"HTTP/1.1 500 ")
                assert json.loads(body)["error"]["type"] == "InternalServerError"
                assert b"bug" not in body
            await client.say(b"GET /late HTTP/1.1\r\nHost: h\r\n\r\n")
            cut_off = await client.hear_all()
            assert not cut_off.endswith(b"0\r\n\r\n")

    run(case())
    assert len([each for each in caplog.records if each.name.startswith("router.")]) == 4


@both_loops
def test_an_aborted_reply_cannot_be_taken_for_a_whole_one(run: Run) -> None:
    async def case() -> None:
        held = Held()
        async with served(held) as at:
            client = await at.client()
            await client.say(GET)
            await held.has(1)
            held.responders[0].start(200, ())
            held.responders[0].write(b"piece")
            await client.hear(b"piece\r\n")
            held.responders[0].abort()
            assert await client.hear_all() == b""
            assert held.told == []

    run(case())


@both_loops
def test_it_listens_on_a_socket_that_is_bound_already(run: Run) -> None:
    async def case() -> None:
        bound = socket.socket()
        bound.bind(("127.0.0.1", 0))
        port = bound.getsockname()[1]
        async with served(echo, bound=bound) as at:
            assert at.port == port
            assert (await at.ask(GET_AND_CLOSE)).startswith(b"HTTP/1.1 200 OK\r\n")

    run(case())
