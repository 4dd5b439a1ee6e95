"""A reader's lease on a version, renewed while its owner is busy.

`transport.py` takes one per load and keeps one `Renewals`, whose thread outlives them: to start one for each load takes
longer than to renew a lease.
"""

from __future__ import annotations

import threading
import time

from connectors.weights.nixl.client import Channel
from connectors.weights.nixl.messages import Confirm, Renew
from connectors.weights.source import FetchError

RENEWALS_PER_LEASE = 3


class HeldLease:
    """Until it is confirmed, refused or let go."""

    def __init__(self, leader: Channel, lease: str, *, lease_s: float, timeout_s: float) -> None:
        """`timeout_s`: for each answer of the leader."""
        self.due = time.monotonic() + lease_s / RENEWALS_PER_LEASE
        self.is_over = False
        self._leader = leader
        self._lease = lease
        self._every_s = lease_s / RENEWALS_PER_LEASE
        self._timeout_s = timeout_s
        self._failure: FetchError | None = None

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
        self.is_over = True

    def renew(self) -> None:
        """Never raises; a failure ends it."""
        self.due = time.monotonic() + self._every_s
        try:
            self._leader.demand(Renew(self._lease), self._timeout_s)
        except FetchError as error:
            self._failure, self.is_over = error, True


class Renewals:
    """One thread for the leases that are held."""

    def __init__(self) -> None:
        self._held: list[HeldLease] = []
        self._closed = False
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None

    def hold(self, lease: HeldLease) -> None:
        """Renew it until it is over."""
        with self._changed:
            self._held.append(lease)
            self._changed.notify()
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="weights-lease", daemon=True)
            self._thread.start()

    def close(self) -> None:
        """Nothing is renewed any more; may be called though it never began."""
        with self._changed:
            self._closed = True
            self._changed.notify()

    def _run(self) -> None:
        while not self._closed:
            for lease in self._next():
                lease.renew()

    def _next(self) -> list[HeldLease]:
        """Those that are due, after a wait for the first."""
        with self._changed:
            self._held = [lease for lease in self._held if not lease.is_over]
            first = min((lease.due for lease in self._held), default=None)
            if self._closed:
                return []
            self._changed.wait(None if first is None else max(0.0, first - time.monotonic()))
            now = time.monotonic()
            return [lease for lease in self._held if lease.due <= now and not lease.is_over]
