"""What readers and producers say to each other beside the reads themselves: one TCP connection each, msgpack, a length
before each message, an answer to each question.

`server.py` answers, `client.py` asks. One-sided reads leave no trace with the producer, so this is how both know where
they are. Producer 0 leads: it knows all layouts and keeps all leases. Why torn weights are never taken for good ones:

1. A version opens (`Leases.serve`) after every producer has finished writing it, devices included. A reader reads only
   after its `Open` was granted.
2. A reader asks `Confirm` when the last of its reads has completed, and believes what it read only if that is granted.
3. The leader grants it only while the version is open and the lease has not ended, and closes the version under the
   same lock. So of close and confirmation one comes first.
4. Every producer writes its memory again only after the close: the leader itself, the others once `AwaitClosed` was
   answered.

All reads of a confirmed reader thus lie between 1 and 4, whoever was slow, stopped or cut off in between. A lease only
bounds how long 4 waits for a reader that is silent. Who was cut off is told so by its next `Renew`, or by `Confirm` at
the latest.
"""

from __future__ import annotations

import socket
import struct
from typing import TypeVar

import msgspec

from connectors.weights.nixl.reads import Region
from connectors.weights.tensors import TensorMeta

_LENGTH = struct.Struct("!Q")
LONGEST = 1 << 32
"""Bytes of one message: more is no message of ours."""


class Producer(msgspec.Struct, frozen=True):
    """One rank that holds shards."""

    host: str
    port: int
    agent: str
    """Name of its NIXL agent: another one in every life of a producer."""
    agent_metadata: bytes
    """NIXL's own: how to reach its registered memory."""
    regions: tuple[Region, ...]


class Layout(msgspec.Struct, frozen=True):
    """Where a version is. Stays the same as long as shards stay where they are."""

    name: str
    tensors: dict[str, TensorMeta]
    producers: tuple[Producer, ...]


class Open(msgspec.Struct, frozen=True, tag=True):
    """To the leader: a reader wants to read a version."""

    reader: str
    version: str
    known_layout: str
    """The one that it has already, or empty."""


class Renew(msgspec.Struct, frozen=True, tag=True):
    """To the leader: still reading."""

    lease: str


class Confirm(msgspec.Struct, frozen=True, tag=True):
    """To the leader: all reads have completed. Ends the lease."""

    lease: str


class Attend(msgspec.Struct, frozen=True, tag=True):
    """To any producer: drive NIXL until `Leave` or the end of this connection, because reads are coming."""


class Leave(msgspec.Struct, frozen=True, tag=True):
    """To a producer that was asked to attend: no more reads. Has no answer."""


class AwaitClosed(msgspec.Struct, frozen=True, tag=True):
    """To the leader, from the other producers."""

    version: str
    timeout_s: float


class Release(msgspec.Struct, frozen=True, tag=True):
    """To the leader, from whoever knows that no more readers will come."""

    version: str


Question = Open | Renew | Confirm | Attend | AwaitClosed | Release


class Opened(msgspec.Struct, frozen=True, tag=True):
    lease: str
    lease_s: float
    """Renew well within it."""
    layout: Layout | None
    """None: the one that the reader knows."""


class Granted(msgspec.Struct, frozen=True, tag=True):
    pass


class Refused(msgspec.Struct, frozen=True, tag=True):
    reason: str


Answer = Opened | Granted | Refused

M = TypeVar("M")


def send(connection: socket.socket, message: Question | Leave | Answer) -> None:
    body = msgspec.msgpack.encode(message)
    connection.sendall(_LENGTH.pack(len(body)) + body)


def receive(connection: socket.socket, decoder: msgspec.msgpack.Decoder[M]) -> M:
    """The next message. EOFError if the other side has hung up."""
    (length,) = _LENGTH.unpack(_exactly(connection, _LENGTH.size))
    if length > LONGEST:
        raise EOFError(f"not a message of ours: {length} bytes")
    return decoder.decode(_exactly(connection, length))


def _exactly(connection: socket.socket, count: int) -> bytearray:
    data = bytearray(count)
    view, filled = memoryview(data), 0
    while filled < count:
        got = connection.recv_into(view[filled:])
        if not got:
            raise EOFError("the other side has hung up")
        filled += got
    return data


QUESTIONS: msgspec.msgpack.Decoder[Question | Leave] = msgspec.msgpack.Decoder(Question | Leave)
ANSWERS: msgspec.msgpack.Decoder[Answer] = msgspec.msgpack.Decoder(Answer)
