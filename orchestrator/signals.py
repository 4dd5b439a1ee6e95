"""Signals that ask a command to end, as `KeyboardInterrupt`s. `cli.py` takes them; a server has handlers of its own."""

from __future__ import annotations

import math
import signal
import time
from types import FrameType

ASKING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
SAME_WISH_S = 2.0
"""Terminals, services and hands send more than one of them."""


def raise_interruptions() -> None:
    """From now on each raises `KeyboardInterrupt`, but for those that come within `SAME_WISH_S` of one that did: they
    are the same wish, and cut nobody off who is ending what was begun. What is ignored (`nohup`) stays so."""
    last = -math.inf

    def interrupt(_sent: int, _frame: FrameType | None) -> None:
        nonlocal last
        now = time.monotonic()
        if now - last >= SAME_WISH_S:
            last = now
            raise KeyboardInterrupt

    for asking in ASKING:
        if signal.getsignal(asking) is not signal.SIG_IGN:
            signal.signal(asking, interrupt)


def ignore_interruptions() -> None:
    """For a process that is ending anyway, and has chosen its exit code."""
    for asking in ASKING:
        signal.signal(asking, signal.SIG_IGN)
