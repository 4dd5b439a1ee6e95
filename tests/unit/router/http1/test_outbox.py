"""What leaves when: at the end of a turn, in order, and before a connection closes."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any, cast

import pytest

from router.io.http1.engine_connection import EngineConnection
from router.io.http1.outbox import Outbox
from router.io.http1.server import HttpServer, Request, Responder
from tests.unit.router.http1.test_engine_bytes import Ledger
from tests.unit.router.http1.test_server_bytes import LIMITS
from tests.unit.router.http1.traffic import FakeTransport


class Turns:
    """In place of the loop: what was left for the end of the turn."""

    def __init__(self) -> None:
        self.left: list[Callable[[], None]] = []

    def call_soon(self, call: Callable[[], None]) -> None:
        self.left.append(call)

    def end(self) -> None:
        left, self.left = self.left, []
        for each in left:
            each()


class Broken(FakeTransport):
    def write(self, data: Any) -> None:
        raise RuntimeError("the transport is broken")


def test_what_is_written_leaves_at_the_end_of_the_turn_in_order() -> None:
    turns, one, other = Turns(), FakeTransport(), FakeTransport()
    outbox = Outbox(turns.call_soon)
    for transport, data in ((one, b"a"), (other, b"x"), (one, b"b"), (one, b"c")):
        outbox.write(transport, data)
    assert (one.written, other.written, len(turns.left)) == (b"", b"", 1)
    turns.end()
    assert (one.written, other.written) == (b"abc", b"x")
    outbox.write(one, b"d")
    turns.end()
    assert (one.written, outbox.turn) == (b"abcd", 2)


def test_a_connection_that_closes_sends_first_what_it_has_and_nothing_twice() -> None:
    turns, closing, other = Turns(), FakeTransport(), FakeTransport()
    outbox = Outbox(turns.call_soon)
    outbox.write(closing, b"last")
    outbox.write(other, b"x")
    outbox.flush(closing)
    assert (closing.written, other.written) == (b"last", b"")
    closing.close()
    outbox.write(closing, b"too late")
    turns.end()
    assert (closing.written, other.written) == (b"last", b"x")


def test_one_broken_transport_does_not_keep_the_others_waiting(caplog: pytest.LogCaptureFixture) -> None:
    turns, broken, other = Turns(), Broken(), FakeTransport()
    outbox = Outbox(turns.call_soon)
    outbox.write(broken, b"a")
    outbox.write(other, b"b")
    turns.end()
    assert (broken.closing, other.written) == (True, b"b")
    assert "the transport is broken" in caplog.text


@pytest.mark.parametrize("piece", [b"x" * 20_000, b"x" * 2_000])
def test_much_of_one_connection_does_not_wait_for_the_end_of_the_turn(piece: bytes) -> None:
    """Its transport has to see that its reader is slow."""
    turns, transport = Turns(), FakeTransport()
    outbox = Outbox(turns.call_soon)
    for count in range(1, 200):
        outbox.write(transport, piece)
        assert len(piece) * count - len(transport.written) <= 16 * 1024
    turns.end()
    assert (len(transport.written), turns.left) == (len(piece) * 199, [])


@pytest.mark.parametrize("body", [b"", b"small", b"large" * 100_000])
def test_a_request_counts_as_sent_once_its_turn_has_ended(body: bytes) -> None:
    turns, transport = Turns(), FakeTransport()
    connection = EngineConnection(Ledger(), ("h", 1), Outbox(turns.call_soon))
    connection.connection_made(transport)
    assert not connection.unsent
    connection.carry(Ledger(), b"head", body)
    assert connection.unsent
    assert transport.written == (b"head" + body if len(body) > 16 * 1024 else b"")
    turns.end()
    assert (connection.unsent, transport.written) == (False, b"head" + body)
    connection.pause_writing()
    assert connection.unsent
    connection.resume_writing()
    assert not connection.unsent


def test_a_request_given_up_within_its_turn_never_leaves() -> None:
    turns, transport = Turns(), FakeTransport()
    connection = EngineConnection(Ledger(), ("h", 1), Outbox(turns.call_soon))
    connection.connection_made(transport)
    connection.carry(Ledger(), b"head", b"body")
    connection.let_go()
    turns.end()
    assert transport.written == b""


def test_a39_a_request_whose_moment_passes_within_its_turn_never_leaves() -> None:
    turns, outcomes = Turns(), list[tuple[list[str], bytes, bool]]()
    outbox = Outbox(turns.call_soon)
    calls = [Ledger() for _ in range(4)]
    late, given_up, timely, _whenever = calls
    late.send_by = given_up.send_by = time.monotonic() - 0.001
    timely.send_by = time.monotonic() + 60
    connections = []
    for call in calls:
        connection = EngineConnection(Ledger(), ("h", 1), outbox)
        connection.connection_made(FakeTransport())
        connection.carry(call, b"head", b"body")
        connections.append(connection)
    connections[1].let_go()
    turns.end()
    for call, connection in zip(calls, connections, strict=True):
        transport = cast(FakeTransport, connection.transport)
        outcomes.append((call.story, transport.written, transport.closing))
    sent = ([], b"headbody", False)
    assert outcomes == [(["late"], b"", True), ([], b"", True), sent, sent]


def test_an_abort_leaves_earlier_replies_of_its_turn_whole() -> None:
    served = list[str]()

    def application(request: Request, responder: Responder) -> None:
        served.append(request.path)
        if request.path == "/good":
            responder.reply(200, (), b"whole")
        else:
            responder.start(200, ())
            raise ValueError("a bug")

    async def case() -> FakeTransport:
        server = HttpServer(application, LIMITS, lambda _status, _message: None)
        transport, connection = FakeTransport(), server.accept()
        connection.connection_made(transport)
        connection.data_received(b"GET /good HTTP/1.1\r\nHost: h\r\n\r\nGET /bad HTTP/1.1\r\nHost: h\r\n\r\n")
        return transport

    transport = asyncio.run(case())
    assert served == ["/good", "/bad"]
    assert transport.closing
    assert b"\r\n\r\nwhole" in transport.written


@pytest.mark.parametrize(
    ("request_bytes", "ends"),
    [
        (b"GET / HTTP/1.1\r\nHost: h\r\nConnection: close\r\n\r\n", False),
        (b"GET / HTTP/1.1\r\nHost: h\r\n\r\n", True),
        (b"no request\r\n\r\n", False),
    ],
)
def test_an_answer_leaves_before_its_connection_closes(request_bytes: bytes, ends: bool) -> None:
    def application(_request: Request, responder: Responder) -> None:
        responder.reply(200, (), b"whole")

    async def case() -> bytes:
        server = HttpServer(application, LIMITS, lambda _status, _message: None)
        transport, connection = FakeTransport(), server.accept()
        connection.connection_made(transport)
        connection.data_received(request_bytes)
        if ends:
            connection.eof_received()
            transport.close()
        assert transport.closing or transport.eof
        return transport.written

    assert asyncio.run(case()).startswith(b"HTTP/1.1 ")
