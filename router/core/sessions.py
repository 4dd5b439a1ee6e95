"""Who is pinned where, and until when.

A session lives from its first request until it is finished, idle for too long, or (without an id) until its
one request ends. Pins also end when their replica is lost. Each ended pin is handed back exactly once, as a
member, to `fleet.py`, which takes it off the load. What a restarted router has to know is collected as records;
`io/journal.py` keeps them.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from router.core.records import PinRecord, SessionRecord
from router.core.table import Member
from router.settings import EngineRole


@dataclass(slots=True, eq=False)
class Session:
    """One conversation, or one request without a session id."""

    id: str | None
    prefill: Member | None = None
    decode: Member | None = None
    colocated: Member | None = None
    open_requests: int = 0
    finished: bool = False
    """It ends with the last of its open requests: the client has finished it, or it is one request's."""
    prefilled: bool = False
    """A prefill leg of it has been served: engines may know its beginning."""
    known_tokens: int = 0
    """How much of the conversation its last served request covered, estimated; 0: nothing yet."""
    known_epoch: int | None = None
    """The epoch in which its last decode replica made that KV."""
    lost: bool = False
    """A replica that it was pinned to is gone; forgotten when it is pinned again."""
    moved_at: float = float("-inf")

    def pin_of(self, role: EngineRole) -> Member | None:
        if role == "prefill":
            return self.prefill
        return self.decode if role == "decode" else self.colocated

    def set_pin(self, role: EngineRole, member: Member | None) -> None:
        if role == "prefill":
            self.prefill = member
        elif role == "decode":
            self.decode = member
        else:
            self.colocated = member

    def pins(self) -> list[Member]:
        return [each for each in (self.prefill, self.decode, self.colocated) if each is not None]


@dataclass(slots=True)
class Sessions:
    """All sessions. `idle_s` None: no session outlives its open requests."""

    idle_s: float | None
    followed: bool = False
    """Somebody takes the changes: only then are they collected."""
    _named: dict[str, Session] = field(default_factory=dict)
    _idle_since: dict[Session, float] = field(default_factory=dict)
    """Sessions without an open request, in the order in which they became idle."""
    _on_member: dict[Member, set[Session]] = field(default_factory=dict)
    _changed: set[str] = field(default_factory=set)
    """Sessions whose record is no longer what was last taken."""

    def __len__(self) -> int:
        return len(self._named)

    def begin_request(self, session_id: str | None, *, lasts: bool = True) -> Session:
        """The session of a new request. A request after `finish` starts the session anew; one that does not last ends
        with its last open request."""
        session = self._named.get(session_id) if session_id is not None else None
        if session is None:
            session = Session(id=session_id)
            if session_id is not None:
                self._named[session_id] = session
        self._idle_since.pop(session, None)
        session.finished = not lasts
        session.open_requests += 1
        return session

    def end_request(self, session: Session, now: float) -> list[Member]:
        """One request of the session is over; the pins that end with it."""
        session.open_requests -= 1
        assert session.open_requests >= 0, f"session {session.id} ended more requests than it began"
        if session.open_requests:
            return []
        if session.id is None or session.finished or self.idle_s is None:
            return self._release(session)
        self._idle_since[session] = now
        return []

    def finish(self, session_id: str) -> list[Member]:
        """End a session now, or with its last open request. Unknown ids are fine: finishing is idempotent."""
        session = self._named.get(session_id)
        if session is None:
            return []
        if session.open_requests:
            session.finished = True
            return []
        return self._release(session)

    def pin(self, session: Session, role: EngineRole, member: Member) -> Member | None:
        """Pin one role; the pin that it replaces."""
        before = session.pin_of(role)
        session.set_pin(role, member)
        session.lost = False
        if before is not None:
            self._on_member[before].discard(session)
        self._on_member.setdefault(member, set()).add(session)
        if self.followed and session.id is not None and not session.finished:
            self._changed.add(session.id)
        return before

    def lose(self, member: Member) -> int:
        """Unpin all sessions of a member that is gone; how many there were. Their next request is placed anew."""
        sessions = self._on_member.pop(member, set())
        for session in sessions:
            session.set_pin(member.role, None)
            session.lost = True
            if self.followed and session.id is not None:
                self._changed.add(session.id)
        return len(sessions)

    def expire(self, now: float) -> list[Member]:
        """End the sessions that have been idle too long; one with an open request is never idle."""
        ended: list[Member] = []
        if self.idle_s is None:
            return ended
        while self._idle_since:
            session, since = next(iter(self._idle_since.items()))
            if now - since < self.idle_s:
                break
            ended += self._release(session)
        return ended

    def take_changes(self) -> list[SessionRecord]:
        """The records of all sessions that changed since the last call."""
        changed, self._changed = self._changed, set()
        return [self._record(each, self._named.get(each)) for each in changed]

    def all_records(self) -> list[SessionRecord]:
        return [self._record(name, session) for name, session in self._named.items() if session.pins()]

    def restore(self, session_id: str, tokens: int, member: Member, now: float) -> bool:
        """Pin a session of an earlier router, idle from now on; False if it has a replica of this role already."""
        if self.idle_s is None:
            return False
        session = self._named.get(session_id)
        if session is None:
            session = self._named[session_id] = Session(id=session_id, known_tokens=tokens)
            self._idle_since[session] = now
        if session.pin_of(member.role) is not None:
            return False
        self.pin(session, member.role, member)
        return True

    @staticmethod
    def _record(name: str, session: Session | None) -> SessionRecord:
        if session is None:
            return SessionRecord(name, {})
        pins = {each.role: PinRecord(each.name, each.instance) for each in session.pins()}
        return SessionRecord(name, pins, session.known_tokens)

    def _release(self, session: Session) -> list[Member]:
        self._idle_since.pop(session, None)
        if session.id is not None:
            self._named.pop(session.id, None)
            if self.followed:
                self._changed.add(session.id)
        pins = session.pins()
        for member in pins:
            self._on_member[member].discard(session)
        session.prefill = session.decode = session.colocated = None
        return pins
