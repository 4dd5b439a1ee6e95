"""Commands under way: which order each has, who has one open, and who is left alone for a while."""

from __future__ import annotations

from orchestrator.weights.acts import Ask, Command
from orchestrator.weights.words import Order, Position


class Post:
    """At most one open command per receiver. An answer to any other is too late and counts for nothing."""

    def __init__(self) -> None:
        self._open: dict[str, Command] = {}
        self._not_before: dict[str, float] = {}
        self._step = 0

    def may_send(self, receiver: str, now: float) -> bool:
        return receiver not in self._open and now >= self._not_before.get(receiver, now)

    def is_waiting(self, receiver: str) -> bool:
        return receiver in self._open

    def send(self, receiver: str, ask: Ask, position: Position) -> Command:
        self._step += 1
        command = Command(receiver=receiver, order=Order(position.last_update, position.attempt, self._step), ask=ask)
        self._open[receiver] = command
        return command

    def take(self, order: Order) -> Command | None:
        """The command that is answered; None where nobody waits for it any more."""
        for receiver, command in self._open.items():
            if command.order == order:
                return self._open.pop(receiver)
        return None

    def rest(self, receiver: str, until: float) -> None:
        self._not_before[receiver] = until

    def drop(self, receiver: str) -> None:
        """Nobody waits for its answer any more."""
        self._open.pop(receiver, None)
        self._not_before.pop(receiver, None)

    def waking(self, now: float) -> list[float]:
        """When receivers may be asked again."""
        return [time for receiver, time in self._not_before.items() if time > now and receiver not in self._open]
