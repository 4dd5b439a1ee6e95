"""A reader's connections to producers: questions with a time limit, and a lease that is renewed while its owner is
busy.

`transport.py` and `server.py` (between producers) ask through it, `server.py` answers.
"""

from __future__ import annotations

import select
import socket
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing

from connectors.weights.bounded import Deadline
from connectors.weights.nixl.messages import (
    ANSWERS,
    Answer,
    Attend,
    Confirm,
    Producer,
    Question,
    Refused,
    Release,
    Renew,
    receive,
    send,
)
from connectors.weights.source import FetchError, SourceInfo, source_field

RENEWALS_PER_LEASE = 3
AT_ONCE = 64
"""Producers that are asked side by side."""


class Channel:
    """One connection to one producer. Every failure is a FetchError that names it."""

    def __init__(self, host: str, port: int, timeout_s: float) -> None:
        self._address = f"{host}:{port}"
        self._one_question = threading.Lock()
        try:
            self._socket = socket.create_connection((host, port), timeout_s)
        except OSError as error:
            raise FetchError(f"producer {self._address} cannot be reached: {error}") from error

    def ask(self, question: Question, timeout_s: float) -> Answer:
        """The answer, refusals too."""
        try:
            with self._one_question:
                self._socket.settimeout(timeout_s)
                send(self._socket, question)
                return receive(self._socket, ANSWERS)
        except (OSError, EOFError, ValueError) as error:
            raise FetchError(f"producer {self._address}: {type(question).__name__} got no answer: {error}") from error

    def demand(self, question: Question, timeout_s: float) -> Answer:
        """The answer; a refusal is an error."""
        answer = self.ask(question, timeout_s)
        if isinstance(answer, Refused):
            raise FetchError(f"producer {self._address}: {answer.reason}")
        return answer

    def check_alive(self) -> None:
        """Raises if the producer has hung up. Between questions it never speaks, so anything to read is the end."""
        if self._one_question.locked():
            return
        # Not `select`, which knows no descriptors above 1023.
        ends = select.poll()
        ends.register(self._socket, select.POLLIN)
        if ends.poll(0):
            raise FetchError(f"producer {self._address} is gone")

    def close(self) -> None:
        self._socket.close()


class HeldLease:
    """A lease that a thread of its own renews until it is confirmed, refused or let go."""

    def __init__(self, leader: Channel, lease: str, *, lease_s: float, timeout_s: float) -> None:
        """`timeout_s`: for each answer of the leader."""
        self._leader = leader
        self._lease = lease
        self._timeout_s = timeout_s
        self._every_s = lease_s / RENEWALS_PER_LEASE
        self._over = threading.Event()
        self._failure: FetchError | None = None
        self._thread = threading.Thread(target=self._renew, name="weights-lease", daemon=True)
        self._thread.start()

    def check(self) -> None:
        """Raises if the lease is known to have ended."""
        if self._failure is not None:
            raise self._failure

    def confirm(self) -> None:
        """All reads have completed. Raises unless all of them were of the whole version."""
        self.let_go()
        self.check()
        self._leader.demand(Confirm(self._lease), self._timeout_s)

    def let_go(self) -> None:
        """Stop renewing. Idempotent."""
        self._over.set()
        self._thread.join()

    def _renew(self) -> None:
        while not self._over.wait(self._every_s):
            try:
                self._leader.demand(Renew(self._lease), self._timeout_s)
            except FetchError as error:
                self._failure = error
                return


def attend(producers: Sequence[Producer], deadline: Deadline) -> list[Channel]:
    """Have all of these drive NIXL until the channels are closed. Many slow ones take no longer than one. Raises
    FetchError where one of them does not, and leaves no channel open then."""
    with ThreadPoolExecutor(AT_ONCE) as pool:
        attempts = [pool.submit(_attended, producer, deadline) for producer in producers]
    failures = [attempt.exception() for attempt in attempts if attempt.exception() is not None]
    channels = [attempt.result() for attempt in attempts if attempt.exception() is None]
    if failures:
        for channel in channels:
            channel.close()
        others = f" (and {len(failures) - 1} more)" if len(failures) > 1 else ""
        raise FetchError(f"{failures[0]}{others}") from failures[0]
    return channels


def _attended(producer: Producer, deadline: Deadline) -> Channel:
    channel = Channel(producer.host, producer.port, deadline.left_s())
    try:
        channel.demand(Attend(), deadline.left_s())
    except BaseException:
        channel.close()
        raise
    return channel


def leader_of(source: SourceInfo, timeout_s: float) -> Channel:
    """A connection to the leader of a version."""
    return Channel(source_field(source, "host", str), source_field(source, "port", int), timeout_s)


def release(source: SourceInfo, timeout_s: float) -> None:
    """Tell the producers of a version that no more readers will come. Raises FetchError."""
    version = source_field(source, "version", str)
    deadline = Deadline(timeout_s, what=f"releasing version {version}")
    with closing(leader_of(source, deadline.left_s())) as leader:
        leader.demand(Release(version), deadline.left_s())
