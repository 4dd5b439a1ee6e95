"""Where requests ask for replicas.

`Desk` stands before the dispatcher: it gives each call the time, delivers the answers that come later, and lets the
clock and the probes move those who wait. `LocalDesk` is how the exchanges of the same process reach it; with several
workers `worker.py` has another one, which asks over a socket.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

from router.core.asks import Ask, Grant, LegEnd, Refusal
from router.core.dispatcher import Dispatcher
from router.core.gate import GateState
from router.io.journal import Journal
from router.io.serving import Serving

if TYPE_CHECKING:
    from router.io.exchange import Exchange

Deliver = Callable[[int, Grant | Refusal], bool]
"""Tell a request what was decided; False if it has left."""


class ExchangeDesk(Protocol):
    """What an exchange needs."""

    def ask(self, ask: Ask, exchange: Exchange) -> Grant | Refusal | None:
        """A replica for a leg; None: `exchange.decided` will be called."""

    def end_leg(self, end: LegEnd) -> None: ...

    def leave(self, number: int) -> None: ...

    def park(self, exchange: Exchange) -> None:
        """Its leg may be closed only when the gate is no longer frozen."""

    def byte_seen(self, replica: str) -> None: ...


class Desk:
    """See the module text."""

    def __init__(self, dispatcher: Dispatcher, deliver: Deliver, loop: asyncio.AbstractEventLoop) -> None:
        self.dispatcher = dispatcher
        self.journal: Journal | None = None
        self._deliver_one = deliver
        self._loop = loop
        self._delivering = False

    def ask(self, ask: Ask) -> Grant | Refusal | None:
        return self.dispatcher.ask(ask, time.monotonic())

    def end_leg(self, end: LegEnd) -> None:
        self.dispatcher.end_leg(end, time.monotonic())
        if end.blamed and end.failure is not None:
            # It may have cost a replica its place: who waits for one must not wait in vain.
            self.dispatcher.look_again(time.monotonic())
        if self.dispatcher.outbox:
            self._deliver_soon()

    def leave(self, number: int) -> None:
        self.dispatcher.leave(number, time.monotonic())
        if self.dispatcher.outbox:
            self._deliver_soon()

    def byte_seen(self, replica: str) -> None:
        self.dispatcher.fleet.byte_seen(replica, time.monotonic())

    def set_gate(self, state: GateState) -> None:
        # What was decided under the old state is on its way before the new one holds.
        self.deliver()
        self.dispatcher.gate.set(state)
        self.look_again()

    def look_again(self) -> None:
        """The gate, an epoch or a replica has changed."""
        self.dispatcher.look_again(time.monotonic())
        if self.dispatcher.outbox:
            self._deliver_soon()

    def tick(self) -> None:
        self.dispatcher.tick(time.monotonic())
        if self.dispatcher.outbox:
            self._deliver_soon()
        if self.journal is not None:
            self.journal.flush()

    def deliver(self) -> None:
        """Tell those who waited."""
        self._delivering = False
        answers, self.dispatcher.outbox = self.dispatcher.outbox, []
        for number, answer in answers:
            if not self._deliver_one(number, answer) and isinstance(answer, Grant):
                # It left between the decision and now; its place goes to the next.
                self.dispatcher.end_leg(LegEnd(ticket=answer.ticket, outcome="cancelled"), time.monotonic())
        if self.dispatcher.outbox:
            self._deliver_soon()

    def _deliver_soon(self) -> None:
        # From the loop, not from within the call that made it possible: an answer sends a leg, which may end another.
        if not self._delivering:
            self._delivering = True
            self._loop.call_soon(self.deliver)


class LocalDesk:
    """The desk of the exchanges that live in the dispatcher's own process."""

    def __init__(self, desk: Desk, serving: Serving) -> None:
        self._desk = desk
        self._serving = serving
        self.end_leg = desk.end_leg
        self.byte_seen = desk.byte_seen
        self.park = serving.park

    def ask(self, ask: Ask, exchange: Exchange) -> Grant | Refusal | None:
        self._serving.open[ask.request] = exchange
        return self._desk.ask(ask)

    def leave(self, number: int) -> None:
        self._serving.open.pop(number, None)
        self._desk.leave(number)
