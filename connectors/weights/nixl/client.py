"""A reader's connections to producers: questions with a time limit, and a lease that is renewed while its owner is
busy.

`transport.py` and `server.py` (between producers) ask through it, `server.py` answers.
"""

from __future__ import annotations

import select
import socket
import threading
from contextlib import closing

from connectors.weights.nixl.messages import (
    ANSWERS,
    Answer,
    AwaitClosed,
    Confirm,
    Question,
    Refused,
    Release,
    Renew,
    receive,
    send,
)
from connectors.weights.source import FetchError, SourceInfo, source_field

RENEWALS_PER_LEASE = 3


class Channel:
    """One connection to one producer. Every failure is a FetchError that names it."""

    def __init__(self, host: str, port: int, timeout_s: float) -> None:
        self._address = f"{host}:{port}"
        self._timeout_s = timeout_s
        self._one_question = threading.Lock()
        try:
            self._socket = socket.create_connection((host, port), timeout_s)
        except OSError as error:
            raise FetchError(f"producer {self._address} cannot be reached: {error}") from error

    def ask(self, question: Question) -> Answer:
        """The answer, refusals too."""
        try:
            with self._one_question:
                # What waits at the other side says so in the question.
                patience_s = question.timeout_s if isinstance(question, AwaitClosed) else 0.0
                self._socket.settimeout(self._timeout_s + patience_s)
                send(self._socket, question)
                return receive(self._socket, ANSWERS)
        except (OSError, EOFError, ValueError) as error:
            raise FetchError(f"producer {self._address}: {type(question).__name__} got no answer: {error}") from error

    def demand(self, question: Question) -> Answer:
        """The answer; a refusal is an error."""
        answer = self.ask(question)
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

    def __init__(self, leader: Channel, lease: str, lease_s: float) -> None:
        self._leader = leader
        self._lease = lease
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
        self._leader.demand(Confirm(self._lease))

    def let_go(self) -> None:
        """Stop renewing. Idempotent."""
        self._over.set()
        self._thread.join()

    def _renew(self) -> None:
        while not self._over.wait(self._every_s):
            try:
                self._leader.demand(Renew(self._lease))
            except FetchError as error:
                self._failure = error
                return


def leader_of(source: SourceInfo, timeout_s: float) -> Channel:
    """A connection to the leader of a version."""
    return Channel(source_field(source, "host", str), source_field(source, "port", int), timeout_s)


def release(source: SourceInfo, timeout_s: float) -> None:
    """Tell the producers of a version that no more readers will come. `timeout_s` bounds each of two steps."""
    with closing(leader_of(source, timeout_s)) as leader:
        leader.demand(Release(source_field(source, "version", str)))
