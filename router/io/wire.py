"""What the process that holds the dispatcher and its workers say to each other, and how it is framed.

One stream socket per worker, messages in order, those of a turn of the loop in one frame: what was granted before the
gate moved arrives before the gate's move. A question carries a number that its answer repeats. `crew.py` is one end,
`worker.py` the other.
"""

from __future__ import annotations

import asyncio
import struct
from collections.abc import Callable
from typing import Any, cast

import msgspec

from router.core.asks import Ask, Grant, LegEnd, Refusal
from router.core.events import HowInterrupted
from router.core.fleet import ReplicaLost
from router.core.gate import GateState
from router.io.metrics import Counts
from router.io.serving import RunningLeg


class _Message(msgspec.Struct, frozen=True, tag=True, array_like=True):
    pass


# -- from a worker ---------------------------------------------------------------------------------------------


class Serves(_Message, frozen=True):
    """The worker listens; it may be told to stop from now on."""

    port: int


class CantServe(_Message, frozen=True):
    """The worker can't listen."""

    reason: str


class Left(_Message, frozen=True):
    number: int


class ByteSeen(_Message, frozen=True):
    replica: str


class Counted(_Message, frozen=True):
    """All that the worker has counted so far, told from time to time so that little is lost with it."""

    counts: Counts


class FinishSession(_Message, frozen=True):
    session_id: str


class WantsReason(_Message, frozen=True):
    question: int


class WantsMetrics(_Message, frozen=True):
    question: int


class WantsUrls(_Message, frozen=True):
    question: int


class WantsAbort(_Message, frozen=True):
    question: int
    request_id: str


# -- to a worker -----------------------------------------------------------------------------------------------


class Hello(_Message, frozen=True):
    """The first message: what the worker is."""

    worker: int
    port: int
    settings: bytes
    """`RouterSettings` as JSON."""
    token: str


class Decided(_Message, frozen=True):
    number: int
    answer: Grant | Refusal


class GateMoved(_Message, frozen=True):
    question: int
    state: GateState


class Lost(_Message, frozen=True):
    replica: str
    instance: str
    silent: bool

    @classmethod
    def of(cls, lost: ReplicaLost) -> Lost:
        return cls(lost.replica, lost.instance, lost.silent)


class Interrupt(_Message, frozen=True):
    question: int
    how: HowInterrupted
    request_id: str | None


class Settle(_Message, frozen=True):
    question: int
    timeout_s: float


class WantsRunning(_Message, frozen=True):
    question: int


class WantsEnded(_Message, frozen=True):
    question: int
    legs: list[RunningLeg]
    timeout_s: float


class WantsIdle(_Message, frozen=True):
    question: int
    url: str
    timeout_s: float


class WantsCounts(_Message, frozen=True):
    question: int


class WantsFinished(_Message, frozen=True):
    question: int


class Stop(_Message, frozen=True):
    """Drain and end."""


# -- both ways -------------------------------------------------------------------------------------------------


class Answered(_Message, frozen=True):
    """The answer to a question, encoded as its asker expects it."""

    question: int
    value: bytes


FromWorker = (
    Serves
    | CantServe
    | Ask
    | LegEnd
    | Left
    | ByteSeen
    | Counted
    | FinishSession
    | WantsReason
    | WantsMetrics
    | WantsUrls
    | WantsAbort
    | Answered
)
ToWorker = (
    Hello
    | Decided
    | GateMoved
    | Lost
    | Interrupt
    | Settle
    | WantsRunning
    | WantsEnded
    | WantsIdle
    | WantsCounts
    | WantsFinished
    | Stop
    | Answered
)

_LENGTH = 4
_LIST, _LIST_MARK = struct.Struct(">BI"), 0xDD
"""How MessagePack begins a list: "array 32" of its specification."""
_ENCODER = msgspec.msgpack.Encoder()


class Link(asyncio.Protocol):
    """One end of the socket: messages out, messages in, questions with answers."""

    def __init__(self, incoming: Any, on_message: Callable[[Any], None], on_lost: Callable[[], None]) -> None:
        self._decoder: msgspec.msgpack.Decoder[list[Any]] = msgspec.msgpack.Decoder(list[incoming])
        self._on_message = on_message
        self._on_lost = on_lost
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport | None = None
        self._received = bytearray()
        self._out: list[bytes] = []
        self._questions = 0
        self._open: dict[int, asyncio.Future[bytes]] = {}

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transports are none of asyncio's classes.
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        buffer = self._received
        buffer += data
        start = 0
        while len(buffer) - start >= _LENGTH:
            end = start + _LENGTH + int.from_bytes(buffer[start : start + _LENGTH], "big")
            if len(buffer) < end:
                break
            messages = self._decoder.decode(memoryview(buffer)[start + _LENGTH : end])
            start = end
            for message in messages:
                if isinstance(message, Answered):
                    self._take_answer(message)
                else:
                    self._on_message(message)
        del buffer[:start]

    def connection_lost(self, _error: Exception | None) -> None:
        self._transport = None
        for future in self._open.values():
            if not future.done():
                future.set_exception(ConnectionResetError("the other process has ended"))
        self._on_lost()

    def send(self, message: Any) -> None:
        """Send with all that is sent in this turn of the loop; nothing happens where the other end is gone."""
        encoded = _ENCODER.encode(message)
        if not self._out:
            self._loop.call_soon(self._flush)
        self._out.append(encoded)

    async def ask(self, question: Callable[[int], Any]) -> bytes:
        """Send what `question` makes of a number and await the answer; ConnectionResetError where none will come."""
        if self._transport is None:
            raise ConnectionResetError("the other process has ended")
        self._questions += 1
        number = self._questions
        future = self._open[number] = self._loop.create_future()
        self.send(question(number))
        try:
            value: bytes = await future
            return value
        finally:
            del self._open[number]

    def answer(self, question: int, value: object) -> None:
        self.send(Answered(question, _ENCODER.encode(value)))

    def close(self) -> None:
        if self._transport is not None:
            self._flush()
            self._transport.close()

    def _take_answer(self, message: Answered) -> None:
        future = self._open.get(message.question)
        if future is not None and not future.done():
            future.set_result(message.value)

    def _flush(self) -> None:
        out, self._out = self._out, []
        if self._transport is not None and out:
            # One list of all that was sent in this turn, so that the other end decodes it at once.
            frame = _LIST.pack(_LIST_MARK, len(out)) + b"".join(out)
            self._transport.write(len(frame).to_bytes(_LENGTH, "big") + frame)
