"""The leader's desk: answers readers about the version that is open, and tells its owner when all are done.

`server.py` brings it the questions of all connections, each on its own thread; the decisions are `leases.py`'s, under
one lock.
"""

from __future__ import annotations

import threading
import time

from connectors.weights.nixl.leases import Leases, Readers
from connectors.weights.nixl.messages import (
    Answer,
    Attend,
    AwaitClosed,
    Confirm,
    Granted,
    Layout,
    Open,
    Opened,
    Question,
    Refused,
    Release,
    Renew,
)


class Desk:
    """Thread-safe."""

    def __init__(self, lease_s: float) -> None:
        self._leases = Leases(lease_s)
        self._layout: Layout | None = None
        self._released = False
        self._told = 0
        # Reentrant: `finish` closes under the lock under which it decided to.
        self._changed = threading.Condition()

    def open(self, version: str, layout: Layout) -> None:
        """From now on readers are let in. The version before must be closed."""
        with self._changed:
            self._layout = layout
            self._released = False
            self._told = 0
            self._leases.serve(version)

    def close(self) -> Readers:
        """Let nobody in any more and cut off who still reads. Harmless when closed."""
        with self._changed:
            readers = self._leases.close(time.monotonic())
            self._changed.notify_all()
            return readers

    def finish(self, version: str, *, readers: int | None, timeout_s: float) -> Readers | None:
        """Close a version once so many readers have come and none is in the middle (None: however many), or `Release`
        was heard and none is in the middle; at the latest after `timeout_s`. None if it was closed already."""
        deadline = time.monotonic() + timeout_s
        with self._changed:
            while self._leases.version == version and (now := time.monotonic()) < deadline:
                enough = 0 if self._released else readers
                if enough is not None and self._leases.settled(enough, now):
                    break
                next_end = self._leases.next_end()
                self._changed.wait(min(deadline, next_end or deadline) - now)
            return self.close() if self._leases.version == version else None

    def note_told(self) -> None:
        """One more of the other producers has heard that the version opened last is closed."""
        with self._changed:
            self._told += 1
            self._changed.notify_all()

    def wait_told(self, producers: int, timeout_s: float) -> None:
        """Until so many have, or the time is over."""
        with self._changed:
            self._changed.wait_for(lambda: self._told >= producers, timeout_s)

    def answer(self, question: Question) -> Answer:
        """Blocks on `AwaitClosed` alone."""
        with self._changed:
            answer = self._decide(question)
            self._changed.notify_all()
            return answer

    def _decide(self, question: Question) -> Answer:
        now = time.monotonic()
        match question:
            case Open():
                return self._let_in(question, now)
            case Renew(lease):
                return Granted() if self._leases.renew(lease, now) else _too_late()
            case Confirm(lease):
                return Granted() if self._leases.confirm(lease, now) else _too_late()
            case AwaitClosed(version, timeout_s):
                closed = self._changed.wait_for(lambda: self._leases.version != version, timeout_s)
                return Granted() if closed else Refused(f"version {version} is still being read")
            case Release(version):
                self._released = self._released or version == self._leases.version
                return Granted()
            case Attend():
                return Granted()

    def _let_in(self, question: Open, now: float) -> Answer:
        lease = self._leases.open(question.reader, question.version, now)
        if lease is None or self._layout is None:
            return Refused(f"version {question.version} is not served; {self._leases.version or 'none'} is")
        layout = None if question.known_layout == self._layout.name else self._layout
        return Opened(lease, self._leases.lease_s, layout)


def _too_late() -> Refused:
    return Refused("the lease has ended, the weights may have changed meanwhile: what was read is worth nothing")
