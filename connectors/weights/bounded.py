"""Blocking calls that nothing can interrupt, waited for no longer than asked: a dead file server, a hung client.

`path.py` and `store.py` do all their reading through it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future, wait
from typing import Any, TypeVar

from connectors.weights.source import FetchError

T = TypeVar("T")


class BoundedCalls:
    """One call at a time. A call that was given up may still write where it was told to, and holds on to that memory;
    so the next one waits for it first, and fails if it doesn't come back."""

    def __init__(self) -> None:
        self._last: Future[Any] | None = None

    def is_idle(self, wait_s: float = 0.0) -> bool:
        """Whether no call is under way, given up or not, within this time."""
        return self._last is None or _ended(self._last, wait_s)

    def when_idle(self, call: Callable[[], None]) -> None:
        """Now, or on its thread as soon as a call that was given up has come back."""
        if self._last is None:
            call()
        else:
            self._last.add_done_callback(lambda _: call())

    def run(self, call: Callable[[], T], *, what: str, timeout_s: float) -> T:
        """What `call` returns or raises. FetchError when it takes longer than `timeout_s`."""
        if not self.is_idle(timeout_s):
            raise FetchError(f"{what}: an earlier read has not come back yet")
        future: Future[T] = Future()
        self._last = future
        # A daemon, so that a call that never returns doesn't keep the process from ending.
        threading.Thread(target=_carry_out, args=(call, future), name="weights-read", daemon=True).start()
        if not _ended(future, timeout_s):
            raise FetchError(f"{what}: not done after {timeout_s:.3g} s")
        self._last = None
        return future.result()


def _ended(future: Future[Any], timeout_s: float) -> bool:
    return future in wait([future], timeout_s).done


def _carry_out(call: Callable[[], T], future: Future[T]) -> None:
    try:
        future.set_result(call())
    except BaseException as error:
        future.set_exception(error)
