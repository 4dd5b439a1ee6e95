"""What goes on beside whoever began it: the acts of the API's routes, what `supervisor/watch.py` and
`replica_keeper.py` do beside their turns, and what a command asks that may be interrupted."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

from orchestrator.errors import HeadraceError

Outcome = TypeVar("Outcome")
_LOG = logging.getLogger(__name__)


def in_background(act: Callable[[], Outcome], name: str) -> Future[Outcome]:
    """As `beside`; and the log has how it failed, whether or not somebody waits for its outcome."""

    def logged() -> Outcome:
        try:
            return act()
        except HeadraceError as error:
            _LOG.warning("%s: %s", name, error)
            raise
        except BaseException:
            _LOG.exception("%s failed in a way that was not foreseen", name)
            raise

    return beside(logged, name)


def beside(act: Callable[[], Outcome], name: str) -> Future[Outcome]:
    """In a thread of its own, which keeps no process from ending."""
    outcome: Future[Outcome] = Future()
    # From here on nobody who waits for it can cancel it.
    outcome.set_running_or_notify_cancel()

    def run() -> None:
        try:
            outcome.set_result(act())
        except BaseException as error:
            # Whatever it is: somebody may wait for the outcome.
            outcome.set_exception(error)

    threading.Thread(target=run, name=name, daemon=True).start()
    return outcome
