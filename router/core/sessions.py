"""Who is pinned where, and until when.

A session lives from its first request until it is finished, idle for too long, or (without an id) until its
one request ends. Pins also end when their replica is lost. Each ended pin is handed back exactly once, as a
`Pin`, to `fleet.py`, which takes it off the load.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from router.settings import EngineRole


@dataclass(frozen=True, slots=True)
class Pin:
    """One role of one session on one replica."""

    role: EngineRole
    replica: str


@dataclass(slots=True, eq=False)
class Session:
    """One conversation, or one request without a session id."""

    id: str | None
    pins: dict[EngineRole, str] = field(default_factory=dict)
    open_requests: int = 0
    finished: bool = False
    """The client has finished it while requests were open: it ends with the last of them."""


class Sessions:
    """All sessions. `idle_s` None: no session outlives its open requests."""

    def __init__(self, idle_s: float | None) -> None:
        self._idle_s = idle_s
        self._named: dict[str, Session] = {}
        self._idle_since: dict[Session, float] = {}
        """Sessions without an open request, in the order in which they became idle."""
        self._on_replica: dict[str, set[Session]] = {}

    def __len__(self) -> int:
        return len(self._named)

    def begin_request(self, session_id: str | None) -> Session:
        """The session of a new request. A request after `finish` starts the session anew."""
        session = self._named.get(session_id) if session_id is not None else None
        if session is None:
            session = Session(id=session_id)
            if session_id is not None:
                self._named[session_id] = session
        self._idle_since.pop(session, None)
        session.finished = False
        session.open_requests += 1
        return session

    def end_request(self, session: Session, now: float) -> list[Pin]:
        """One request of the session is over; the pins that end with it."""
        session.open_requests -= 1
        assert session.open_requests >= 0, f"session {session.id} ended more requests than it began"
        if session.open_requests:
            return []
        if session.id is None or session.finished or self._idle_s is None:
            return self._release(session)
        self._idle_since[session] = now
        return []

    def finish(self, session_id: str) -> list[Pin]:
        """End a session now, or with its last open request. Unknown ids are fine: finishing is idempotent."""
        session = self._named.get(session_id)
        if session is None:
            return []
        if session.open_requests:
            session.finished = True
            return []
        return self._release(session)

    def pin(self, session: Session, role: EngineRole, replica: str) -> Pin | None:
        """Pin one role; the pin that it replaces."""
        before = session.pins.get(role)
        session.pins[role] = replica
        if before is not None:
            self._on_replica[before].discard(session)
        self._on_replica.setdefault(replica, set()).add(session)
        return Pin(role, before) if before is not None else None

    def lose_replica(self, replica: str) -> list[Pin]:
        """Unpin all sessions of a replica that is gone; their next request is placed anew."""
        lost = []
        for session in self._on_replica.pop(replica, ()):
            for role in [role for role, name in session.pins.items() if name == replica]:
                del session.pins[role]
                lost.append(Pin(role, replica))
        return lost

    def expire(self, now: float) -> list[Pin]:
        """End the sessions that have been idle too long; one with an open request is never idle."""
        ended: list[Pin] = []
        if self._idle_s is None:
            return ended
        while self._idle_since:
            session, since = next(iter(self._idle_since.items()))
            if now - since < self._idle_s:
                break
            ended += self._release(session)
        return ended

    def _release(self, session: Session) -> list[Pin]:
        self._idle_since.pop(session, None)
        if session.id is not None:
            self._named.pop(session.id, None)
        pins = [Pin(role, replica) for role, replica in session.pins.items()]
        for pin in pins:
            self._on_replica[pin.replica].discard(session)
        session.pins.clear()
        return pins
