"""The coordinator's shell: carries acts out in their order, brings answers and the clock back as events.

`machine.py` decides, `receivers.py` talks to engines, router and pool, `journal.py` keeps the record.
`orchestrator/supervision.py` gives it turns, and tells it what it sees of the processes.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from queue import Empty, SimpleQueue

from orchestrator.store.events import Event as NotedEvent
from orchestrator.store.home import StateUnusable
from orchestrator.weights import acts
from orchestrator.weights.events import Answered, EngineEnded, Event, OutcomeLost, Ticked
from orchestrator.weights.journal import Journal
from orchestrator.weights.machine import Coordinator
from orchestrator.weights.told import events_of_answer
from orchestrator.weights.words import Position

HELD_UP_S = 1.0
"""Between two looks at the answers. Whatever comes on top, a disk that does not write for instance, is no time in which
anybody could be late."""

_log = logging.getLogger(__name__)


class Runner:
    """Of one job. Only one thread may give it turns."""

    def __init__(
        self,
        *,
        coordinator: Coordinator,
        journal: Journal,
        carry_out: Callable[[acts.Command], Event],
        restart: Callable[[str, str], None],
    ) -> None:
        """`carry_out` blocks until a command has its event, and raises nothing that is foreseen. `restart` takes an
        engine's name and why; it returns at once."""
        self._coordinator = coordinator
        self._journal = journal
        self._carry_out = carry_out
        self._restart = restart
        self._answers: SimpleQueue[tuple[acts.Command, Event]] = SimpleQueue()
        self._told: dict[str, NotedEvent] = {}
        """The newest of each receiver: some commands are sent again and again."""
        self._looked_at = time.monotonic()
        self._held_up_s = 0.0

    @property
    def position(self) -> Position:
        return self._coordinator.position

    def take(self, event: Event) -> None:
        """Raises `UpdateRefused` as the machine does, and `CoordinatorReplaced` where another one acts now: then this
        one must not go on, and neither must it after any other exception."""
        for act in self._coordinator.step(event, self._now()):
            match act:
                case acts.Record():
                    self._journal.record(act.position)
                case acts.Command():
                    # Never waited for at the end: a receiver may be silent for as long as its command may take.
                    threading.Thread(target=self._send, args=(act,), name=f"to {act.receiver}", daemon=True).start()
                case acts.Restart():
                    self._remark(f"{act.name} is given up and started again: {act.why}")
                    # Whoever saw a life end gets another one started, and by now it may be there.
                    if not isinstance(event, EngineEnded):
                        self._restart(act.name, act.why)
                case acts.Say():
                    self._remark(act.text)
                case acts.Finish():
                    _log.info("update %d: %s %s", act.ended.update, act.ended.outcome, act.ended.why)

    def turn(self, at_most_s: float) -> None:
        """Wait for one answer, or for the time that the machine wants to be woken; then let it go on."""
        now = self._now()
        wait_s = max(0.0, min(at_most_s, self._coordinator.wake_at(now) - now))
        try:
            command, event = self._answers.get(timeout=wait_s)
        except Empty:
            command, event = None, Ticked()
        self._now(waited_s=wait_s)
        self.take(event)
        # After the commands that follow: nobody waits for it.
        if command is not None and isinstance(event, Answered) and not event.error:
            self._tell(command)

    def _now(self, waited_s: float = 0.0) -> float:
        """The machine's time: it stands still while this thread is held up, since answers wait unread then."""
        now = time.monotonic()
        self._held_up_s += max(0.0, now - self._looked_at - waited_s - HELD_UP_S)
        self._looked_at = now
        return now - self._held_up_s

    def _tell(self, done: acts.Command) -> None:
        for event in events_of_answer(done):
            if self._told.get(event.process) == event:
                continue
            self._told[event.process] = event
            try:
                self._journal.note(event)
            except StateUnusable as error:
                _log.warning("not noted: %s: %s", event.text, error)

    def _remark(self, text: str) -> None:
        _log.warning("%s", text)
        self._journal.remark(text)

    def _send(self, command: acts.Command) -> None:
        try:
            self._answers.put((command, self._carry_out(command)))
        except Exception:
            _log.exception("a command to %s failed in a way that was not foreseen", command.receiver)
            self._answers.put((command, OutcomeLost(order=command.order)))
