"""What is written to sockets within one turn of the event loop leaves at its end.

A write to a socket wakes the process that waits for it, which is what costs most of a small write. Sent one after the
other, the writes of a turn find their readers awake. The price: the first of them waits for the whole turn. Much of one
transport is sent at once, so that it can say that its reader is slow.

`server.py` and `client.py` have an outbox each, and all that their connections write goes through it; a connection that
closes calls `flush` first.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable

_log = logging.getLogger(__name__)

_MOST_BYTES = 16 * 1024
_MOST_PIECES = 8
"""More than either is not kept."""


class Outbox:
    """See the module text."""

    __slots__ = ("_call_soon", "_limited", "_scheduled", "_waiting", "turn")

    def __init__(self, call_soon: Callable[[Callable[[], None]], object]) -> None:
        """`call_soon`: the loop's."""
        self._call_soon = call_soon
        self._scheduled = False
        self._waiting: dict[asyncio.Transport, list[bytes]] = {}
        self._limited: list[tuple[float, asyncio.Transport, Callable[[], None]]] = []
        self.turn = 0
        """What was written in an earlier turn is with its transport."""

    def write(self, transport: asyncio.Transport, data: bytes) -> None:
        """Send this at the end of this turn at the latest, behind what the transport was given before."""
        if not self._scheduled:
            self._scheduled = True
            self._call_soon(self._end_turn)
        pieces = self._waiting.get(transport)
        if pieces is None:
            self._waiting[transport] = [data]
        else:
            pieces.append(data)
        if len(data) > _MOST_BYTES or (pieces is not None and len(pieces) > _MOST_PIECES):
            self.flush(transport)

    def only_until(self, moment: float, transport: asyncio.Transport, too_late: Callable[[], None]) -> None:
        """What this transport has waiting is not sent after this moment of the monotonic clock; `too_late` is called
        instead."""
        self._limited.append((moment, transport, too_late))

    def flush(self, transport: asyncio.Transport) -> None:
        """Send now what this transport has waiting."""
        pieces = self._waiting.pop(transport, None)
        if pieces is not None:
            _send(transport, pieces)

    def _end_turn(self) -> None:
        # Transports that are written to from here on, by what a transport tells as it is sent to, wait for the next.
        waiting, self._waiting = self._waiting, {}
        limited, self._limited = self._limited, []
        self._scheduled = False
        self.turn += 1
        if limited:
            now = time.monotonic()
            for moment, transport, too_late in limited:
                if now > moment:
                    _drop(transport, too_late, waiting)
        for transport, pieces in waiting.items():
            try:
                _send(transport, pieces)
            except Exception:
                # Whatever becomes of one connection, the others are served.
                _log.exception("a write failed")
                transport.abort()


def _drop(
    transport: asyncio.Transport, too_late: Callable[[], None], waiting: dict[asyncio.Transport, list[bytes]]
) -> None:
    if waiting.pop(transport, None) is not None:
        try:
            too_late()
        except Exception:
            _log.exception("a request that is too late could not be given up")


def _send(transport: asyncio.Transport, pieces: list[bytes]) -> None:
    if transport.is_closing():
        return
    if len(pieces) == 1:
        transport.write(pieces[0])
    else:
        transport.writelines(pieces)
