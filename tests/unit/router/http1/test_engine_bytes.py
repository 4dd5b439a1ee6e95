"""Whatever bytes an engine sends, a call hears of exactly one end, and a connection is kept only after a clean one."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from router.io.http1.engine_connection import CallListener, EngineConnection, Failure
from router.io.http1.outbox import Outbox
from tests.unit.router.http1.traffic import FakeTransport, mutated

SEEDS = [
    b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nhello",
    b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n0\r\nT: r\r\n\r\n",
    b"HTTP/1.1 100 Continue\r\n\r\n",
    b"HTTP/1.1 101 Switching\r\nConnection: upgrade\r\nUpgrade: h2c\r\n\r\n",
    b"HTTP/1.0 200 OK\r\n\r\nuntil the end",
    b"HTTP/1.1 204 No Content\r\nConnection: close\r\n\r\n",
    b"\r\n", b"\x00", b"\xff", b"0\r\n", b" ", b"HTTP/",
]  # fmt: skip


class Ledger:
    """Call, listener and owner in one: keeps the order of what happens."""

    def __init__(self) -> None:
        self.listener: CallListener = self
        self.story: list[str] = []
        self.send_by: float | None = None

    def head(self, status: int, headers: dict[bytes, bytes]) -> None:
        assert self.story == []
        self.story.append("head")

    def data(self, chunk: bytes) -> None:
        assert chunk
        assert set(self.story) <= {"head", "data"}
        self.story.append("data")

    def ended(self) -> None:
        self.story.append("ended")

    def failed(self, failure: Failure, detail: str) -> None:
        raise AssertionError("the call tells, not the connection")

    def fail(self, failure: Failure, detail: str) -> None:
        self.story.append(failure)

    def connection_done(self) -> None:
        self.story.append("done")

    def connection_broke(self, detail: str, *, answered: bool) -> None:
        self.story.append("broke" if answered else "broke unanswered")

    def released(self, connection: EngineConnection) -> None:
        self.story.append("released")

    def lost(self, connection: EngineConnection) -> None:
        pass


@given(pieces=mutated(SEEDS), eof=st.booleans())
def test_every_stream_of_bytes_ends_a_call_once(pieces: list[bytes], eof: bool) -> None:
    ledger, transport = Ledger(), FakeTransport()
    connection = EngineConnection(ledger, ("h", 1), Outbox(lambda _flush: None))
    connection.connection_made(transport)
    connection.carry(ledger, b"head", b"body")
    for piece in pieces:
        if not transport.closing:
            connection.data_received(piece)
    if eof and not transport.closing:
        connection.eof_received()
    connection.connection_lost(None)
    story = [each for each in ledger.story if each not in ("head", "data")]
    if "ended" in story:
        assert ledger.story[0] == "head"
        assert story in (["done", "ended"], ["done", "released", "ended"])
    else:
        assert story in (["broke"], ["broke unanswered"])
