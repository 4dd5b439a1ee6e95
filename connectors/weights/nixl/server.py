"""A producer: lets readers read its shards where they are, and says when they may be overwritten.

One per rank, in a trainer (`connectors/publisher/nixl.py`) or in an engine that serves a peer. `holdings.py` comes
before it, `transport.py` reads. The protocol stands in `messages.py`.
"""

from __future__ import annotations

import hashlib
import socket
import socketserver
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from typing import Any

import msgspec
import torch

from connectors.weights.holdings import Holding
from connectors.weights.nixl.agent import MemoryRegion, Registered, make_agent, memory_of
from connectors.weights.nixl.client import Channel
from connectors.weights.nixl.desk import Desk
from connectors.weights.nixl.leases import Readers
from connectors.weights.nixl.messages import (
    QUESTIONS,
    Attend,
    AwaitClosed,
    Granted,
    Layout,
    Leave,
    Producer,
    Refused,
    receive,
    send,
)
from connectors.weights.nixl.reads import Region
from connectors.weights.source import FetchError, SourceInfo
from connectors.weights.tensors import TensorMeta

LEASE_S = 15.0
"""A reader that died holds its producers up for so long, unless said otherwise."""
DRIVE_EVERY_S = 0.0005
"""While attended. What needs the producer's processor (TCP, new connections) moves on only then."""
PEER_TIMEOUT_S = 30.0
"""For a leader that does not answer: it is gone, or its process stands still."""
LEADER_LATE_S = 1800.0
"""How much later than the others a leader may begin to wait, as torch.distributed has it: it tells engines first."""
EVERY_ADDRESS = ("", "0.0.0.0", "::")

Gather = Callable[[Any], Sequence[Any]]
"""Collective over the producers of a version: everybody's object, in the order of their ranks."""


class Offer(msgspec.Struct, frozen=True):
    """What one producer tells the leader."""

    producer: Producer
    tensors: dict[str, TensorMeta]


class ServeError(Exception):
    """A version could not be served; the same on all ranks, with what each one says."""


@dataclass(slots=True)
class NixlPublication:
    """A version that is served, as one producer sees it."""

    source: SourceInfo
    _server: NixlServer
    readers: Readers | None = None
    """What became of them: on the leader, once `wait_done` has returned."""

    def wait_done(self, timeout_s: float, readers: int | None = None) -> None:
        """Return when this producer may overwrite its shards. Call it on every rank.

        That is when `readers` have read everything or lost their lease, or `Release` was heard, and nobody is in the
        middle; after `timeout_s` at the latest, when whoever still reads is cut off. The leader (rank 0) decides, and
        its time counts from its own call. The others ask it: a FetchError if it can't be asked, and then nothing may
        be overwritten.
        """
        self.readers = self._server.wait_done(self.source, readers=readers, timeout_s=timeout_s)


class NixlServer:
    """Serves one version at a time."""

    def __init__(self, *, host: str, port: int = 0, lease_s: float = LEASE_S) -> None:
        """`host`: where readers reach this rank, and the one address that is listened on."""
        if host in EVERY_ADDRESS:
            raise ValueError(f"host {host!r} is every address of this machine: give the one by which readers reach it")
        self._agent = make_agent()
        self._registered = Registered(self._agent)
        self._shards: list[MemoryRegion] = []
        self._desk = Desk(lease_s)
        self._attendance = _Attendance(self._agent)
        try:
            self._listener = _Listener(host, port, self._desk, self._attendance)
        except BaseException:
            self._attendance.stop()
            raise
        self._leads = False
        self._is_asked = False
        """The other producers ask this one whether its last version is closed."""
        self._digests: tuple[str, ...] = ()
        self._layout: Layout | None = None

    def serve(
        self, version: str, tensors: Mapping[str, TensorMeta], held: Sequence[Holding], *, rank: int, gather: Gather
    ) -> NixlPublication:
        """Open a version to readers. Collective; from now on until `wait_done` has returned the shards must stay as
        they are.

        A version that is still open is closed first.
        """
        self._desk.close()
        self._is_asked = False
        try:
            own, failure = self._offer(tensors, held), ""
        except Exception as error:  # The other ranks wait for this one: it tells them.
            own, failure = None, f"{type(error).__name__}: {error}"
        failures = gather(failure)
        if own is None or any(failures):
            raise ServeError("; ".join(f"rank {number}: {text}" for number, text in enumerate(failures) if text))
        layout = self._exchange(own, gather)
        self._leads = rank == 0
        if self._leads:
            self._desk.open(version, layout)
        # Nobody hands out the source before it is open.
        gather(None)
        leader = layout.producers[0]
        source = {"transport": "nixl", "version": version, "host": leader.host, "port": leader.port}
        return NixlPublication(source, self)

    def wait_done(self, source: SourceInfo, *, readers: int | None, timeout_s: float) -> Readers | None:
        if self._leads:
            self._is_asked = True
            return self._desk.finish(source["version"], readers=readers, timeout_s=timeout_s)
        leader = Channel(source["host"], source["port"], PEER_TIMEOUT_S)
        try:
            until = time.monotonic() + timeout_s + LEADER_LATE_S
            while isinstance(leader.ask(AwaitClosed(source["version"], PEER_TIMEOUT_S), 2 * PEER_TIMEOUT_S), Refused):
                if time.monotonic() > until:
                    raise FetchError(
                        f"rank 0 has not ended version {source['version']}: it waits too late or not at all"
                    )
        finally:
            leader.close()
        return None

    @property
    def attended(self) -> int:
        """How many readers NIXL is driven for."""
        return self._attendance.readers

    def close(self) -> None:
        """Cut everybody off and free everything, but for other producers that are still in `wait_done`: they are told
        first. Idempotent."""
        self._desk.close()
        if self._is_asked:
            self._is_asked = False
            self._desk.wait_told(len(self._digests) - 1, PEER_TIMEOUT_S)
        self._listener.stop()
        self._attendance.stop()
        self._registered.unuse_all()

    def _offer(self, tensors: Mapping[str, TensorMeta], held: Sequence[Holding]) -> Offer:
        shards = [holding.tensor for holding in held]
        for device in {shard.device for shard in shards if shard.is_cuda}:
            # Readers don't wait for this process's streams.
            torch.cuda.synchronize(device)
        before, self._shards = self._shards, self._registered.use(shards)
        self._registered.unuse(before)
        producer = Producer(
            self._listener.host,
            self._listener.port,
            self._agent.name,
            self._agent.get_agent_metadata(),
            tuple(_region(holding) for holding in held),
        )
        return Offer(producer, dict(tensors))

    def _exchange(self, own: Offer, gather: Gather) -> Layout:
        """All offers to all, but only when one of them has changed: they may be long."""
        digests = tuple(gather(hashlib.sha256(msgspec.msgpack.encode(own)).hexdigest()))
        if self._layout is None or digests != self._digests:
            self._layout = _layout(hashlib.sha256("".join(digests).encode()).hexdigest(), gather(own))
            self._digests = digests
        return self._layout


def _layout(name: str, offers: Sequence[Offer]) -> Layout:
    tensors: dict[str, TensorMeta] = {}
    for rank, offer in enumerate(offers):
        for tensor, meta in offer.tensors.items():
            if tensors.setdefault(tensor, meta) != meta:
                raise ServeError(f"{tensor} is {meta} on rank {rank}, and {tensors[tensor]} on one before it")
    return Layout(name, tensors, tuple(offer.producer for offer in offers))


def _region(holding: Holding) -> Region:
    tensor = holding.tensor
    memory, device = memory_of(tensor)
    strides = tuple(step * tensor.element_size() for step in tensor.stride())
    return Region(holding.piece, tensor.data_ptr(), strides, memory, device)


class _Attendance:
    """Drives the agent while a reader wants it: otherwise the trainer has its processor to itself."""

    def __init__(self, agent: Any) -> None:
        self._agent = agent
        self.readers = 0
        self._stopping = False
        self._changed = threading.Condition()
        self._device = torch.cuda.current_device() if torch.cuda.is_initialized() else None
        self._thread = threading.Thread(target=self._drive, name="weights-drive", daemon=True)
        self._thread.start()

    def __enter__(self) -> None:
        with self._changed:
            self.readers += 1
            self._changed.notify()

    def __exit__(self, *_: object) -> None:
        with self._changed:
            self.readers -= 1

    def stop(self) -> None:
        with self._changed:
            self._stopping = True
            self._changed.notify()
        self._thread.join()

    def _drive(self) -> None:
        if self._device is not None:
            # Where this thread has to copy out of a GPU, UCX looks for the CUDA context of the thread.
            torch.cuda.set_device(self._device)
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self.readers or self._stopping)
                if self._stopping:
                    return
            # Nobody sends notifications: asking for them is how NIXL lets itself be driven.
            self._agent.get_new_notifs()
            time.sleep(DRIVE_EVERY_S)


class _Listener(socketserver.ThreadingTCPServer):
    """One thread per connection: readers are few, and each mostly waits."""

    daemon_threads = True
    block_on_close = False
    allow_reuse_address = True
    request_queue_size = 512

    def __init__(self, host: str, port: int, desk: Desk, attendance: _Attendance) -> None:
        self.address_family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        super().__init__((host, port), _Conversation)
        self.host, self.port = host, int(self.server_address[1])
        self.desk, self.attendance = desk, attendance
        self.connected: set[socket.socket] = set()
        self._thread = threading.Thread(target=self.serve_forever, name="weights-listen", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        self.shutdown()
        self.server_close()
        self._thread.join()
        for connection in list(self.connected):
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)


class _Conversation(socketserver.BaseRequestHandler):
    server: _Listener
    request: socket.socket

    def setup(self) -> None:
        # A reader whose machine vanished must not be attended for good.
        self.request.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        self.request.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.server.connected.add(self.request)

    def finish(self) -> None:
        self.server.connected.discard(self.request)

    def handle(self) -> None:
        # Whoever hangs up or talks nonsense ends its own connection, nothing else.
        with suppress(OSError, EOFError, msgspec.MsgspecError):
            self._answer_all()

    def _answer_all(self) -> None:
        with ExitStack() as attending:
            while True:
                question = receive(self.request, QUESTIONS)
                if isinstance(question, Attend | Leave):
                    attending.close()
                if isinstance(question, Leave):
                    continue
                if isinstance(question, Attend):
                    attending.enter_context(self.server.attendance)
                answer = self.server.desk.answer(question)
                send(self.request, answer)
                if isinstance(question, AwaitClosed) and isinstance(answer, Granted):
                    self.server.desk.note_told()
