"""A dispatcher over a fleet of the usual shape, and questions in short."""

from __future__ import annotations

from typing import Any

from router.core.asks import Ask, Grant, LegEnd, LegOutcome, Refusal
from router.core.dispatcher import Dispatcher, Limits
from router.core.epochs import Epochs
from router.core.fleet import Fleet
from router.core.gate import Gate
from tests.unit.router.fleets import EPOCH, make_fleet

Answer = Grant | Refusal | None


class Room:
    """A dispatcher and who has been answered."""

    def __init__(self, fleet: Fleet | None = None, **settings: Any) -> None:
        limits: dict[str, Any] = {
            "max_requests": None, "max_waiting": 100, "max_wait_s": 60.0, "skip_prefill_below_tokens": 0,
        }  # fmt: skip
        limits |= {name: settings.pop(name) for name in list(settings) if name in limits}
        self.fleet = fleet if fleet is not None else make_fleet(**settings)
        self.gate, self.epochs = Gate(), Epochs()
        self.gate.set("open")
        self.epochs.commit(EPOCH, f"v{EPOCH}")
        self.dispatcher = Dispatcher(fleet=self.fleet, gate=self.gate, epochs=self.epochs, limits=Limits(**limits))

    def ask(self, number: int, *, now: float = 0.0, **more: Any) -> Answer:
        asked: dict[str, Any] = {
            "request": number, "place": number, "serial": 1, "session": None, "session_lasts": True, "tokens": 1,
        }  # fmt: skip
        return self.dispatcher.ask(Ask(**asked | more), now)

    def granted(self, number: int, **asked: Any) -> Grant:
        answer = self.ask(number, **asked)
        assert isinstance(answer, Grant), answer
        return answer

    def refused(self, number: int, **asked: Any) -> Refusal:
        answer = self.ask(number, **asked)
        assert isinstance(answer, Refusal), answer
        return answer

    def end(self, grant: Grant, outcome: LegOutcome = "ok", now: float = 0.0, **facts: Any) -> None:
        self.dispatcher.end_leg(LegEnd(ticket=grant.ticket, outcome=outcome, **facts), now)

    def done(self, number: int, grant: Grant, now: float = 0.0) -> None:
        self.end(grant, now=now)
        self.dispatcher.leave(number, now)

    def look(self, now: float = 0.0) -> None:
        self.dispatcher.look_again(now)

    def told(self) -> list[tuple[int, str]]:
        """Who has been answered since the last time, in order: the replica, or the kind of the refusal."""
        outbox, self.dispatcher.outbox = self.dispatcher.outbox, []
        return [(number, answer.replica if isinstance(answer, Grant) else answer.kind) for number, answer in outbox]
