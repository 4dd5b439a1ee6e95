"""What may take too long: several steps within one time, and blocking calls that nothing can interrupt (a dead file
server, a hung client), waited for no longer than asked.

`path.py` and `store.py` do all their reading through such calls.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, wait
from typing import Any, TypeVar

from connectors.weights.source import FetchError

T = TypeVar("T")


class Deadline:
    """One time limit for several steps."""

    def __init__(self, timeout_s: float, *, what: str) -> None:
        self._timeout_s = timeout_s
        self._end = time.monotonic() + timeout_s
        self._what = what

    def left_s(self) -> float:
        """For the next step. Raises FetchError where nothing is left."""
        left_s = self._end - time.monotonic()
        if left_s <= 0:
            raise FetchError(f"{self._what}: not done after {self._timeout_s:g} s")
        return left_s


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
