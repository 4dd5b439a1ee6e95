"""Whatever bytes a client sends, the server answers or closes, and no exception leaves the protocol."""

from __future__ import annotations

import asyncio

from hypothesis import example, given

from router.io.http1.server import Exchange, HttpServer, Limits, Request, Responder
from tests.unit.router.http1.traffic import FakeTransport, mutated

LIMITS = Limits(
    max_body_bytes=200, max_header_bytes=300, header_timeout_s=60.0, body_timeout_s=60.0, idle_timeout_s=60.0
)
SEEDS = [
    b"GET /a HTTP/1.1\r\nHost: h\r\n\r\n",
    b"POST /b HTTP/1.1\r\nHost: h\r\nContent-Length: 5\r\nExpect: 100-continue\r\n\r\nhello",
    b"POST /c HTTP/1.1\r\nHost: h\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n0\r\nT: r\r\n\r\n",
    b"GET http://h/d?x#y HTTP/1.0\r\nConnection: keep-alive\r\nUpgrade: h2c\r\n\r\n",
    b"HEAD /e HTTP/1.1\r\nHost: h\r\nConnection: close\r\n\r\n",
    b"CONNECT h:1 HTTP/1.1\r\nHost: h\r\nConnection: upgrade\r\nUpgrade: websocket\r\n\r\n",
    b"POST /raise HTTP/1.1\r\nHost: h\r\nContent-Length: 0\r\n\r\n",
    b"POST /stream HTTP/1.1\r\nHost: h\r\nContent-Length: 1\r\n\r\nx",
    b"\r\n\r\n", b"\x00", b"\xff", b"\n", b"0\r\n", b" ", b":", b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
]  # fmt: skip


def application(request: Request, responder: Responder) -> Exchange | None:
    if request.path == "/raise":
        raise ValueError("a bug")
    if request.path == "/stream":
        responder.start(200, ())
        responder.write(b"piece")
        responder.end()
    else:
        responder.reply(200, (), b"whole")
    return None


@example([b"POST /b HTTP/1.1\r\nHost: h\r\nContent-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n"])
@given(mutated(SEEDS))
def test_every_stream_of_bytes_is_answered_or_closed(pieces: list[bytes]) -> None:
    served, refused = list[Request](), list[int]()

    def counted(request: Request, responder: Responder) -> Exchange | None:
        served.append(request)
        return application(request, responder)

    async def case() -> FakeTransport:
        server = HttpServer(counted, LIMITS, lambda status, _message: refused.append(status))
        transport, connection = FakeTransport(), server.accept()
        connection.connection_made(transport)
        for piece in pieces:
            if not transport.closing:
                connection.data_received(piece)
        if not transport.closing:
            connection.eof_received()
        connection.connection_lost(None)
        assert server.connections == 0
        return transport

    transport = asyncio.run(case())
    finals = transport.written.count(b"HTTP/1.1 ") - transport.written.count(b"HTTP/1.1 100 ")
    assert finals == len(served) + len(refused)
    assert len(refused) <= 1
    assert transport.eof == bool(refused)
