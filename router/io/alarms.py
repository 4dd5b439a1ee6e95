"""Deadlines of many requests, looked at from time to time.

A timer of the event loop per leg would be set and cancelled thousands of times a second and almost never ring.
`exchange.py` writes down until when it waits; one sweep finds those whose time has come, at most `RESOLUTION_S` late.
"""

from __future__ import annotations

import asyncio
import time
from typing import Protocol

RESOLUTION_S = 0.05


class Sleeper(Protocol):
    def time_reached(self) -> None: ...


class Alarms:
    """See the module text."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._at: dict[Sleeper, float] = {}
        self._sweeping = False

    def set(self, sleeper: Sleeper, at: float) -> None:
        """Wake the sleeper then, and no longer when it was set to before. Times are of the monotonic clock."""
        self._at[sleeper] = at
        if not self._sweeping:
            self._sweeping = True
            self._loop.call_later(RESOLUTION_S, self._sweep)

    def clear(self, sleeper: Sleeper) -> None:
        self._at.pop(sleeper, None)

    def _sweep(self) -> None:
        now = time.monotonic()
        try:
            for sleeper in [each for each, at in self._at.items() if at <= now]:
                if self._at.get(sleeper, now + 1) <= now:
                    del self._at[sleeper]
                    sleeper.time_reached()
        finally:
            # Whatever becomes of one sleeper, the others are woken.
            self._sweeping = bool(self._at)
            if self._sweeping:
                self._loop.call_later(RESOLUTION_S, self._sweep)
