"""What a restarted router has to know of its sessions: `sessions.py` makes it, `io/journal.py` keeps it."""

from __future__ import annotations

import msgspec

from router.settings import EngineRole


class PinRecord(msgspec.Struct, frozen=True):
    """One pin, as it outlives the router."""

    replica: str
    instance: str


class SessionRecord(msgspec.Struct, frozen=True):
    """A session's pins at one moment; without pins: it is over."""

    id: str
    pins: dict[EngineRole, PinRecord]
    tokens: int = 0
