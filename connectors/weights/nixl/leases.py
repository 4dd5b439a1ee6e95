"""Who reads the version that is served, and until when: decides when its memory may be overwritten. No IO, no clock.

Before it comes `server.py`, which asks under one lock and passes the time. The rules on which no torn read can be taken
for a good one stand in `messages.py`.
"""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Readers:
    """What became of those who opened a version."""

    confirmed: frozenset[str]
    """Have read everything before the version closed."""
    lost: frozenset[str]
    """Their lease ended before they had."""


@dataclass(slots=True)
class Leases:
    """The version that is open, and its readers by name."""

    lease_s: float
    version: str | None = None
    """None: closed, the memory is its owner's."""
    _expires: dict[str, float] = field(default_factory=dict)
    """Readers in the middle of it, by lease."""
    _reader: dict[str, str] = field(default_factory=dict)
    _confirmed: set[str] = field(default_factory=set)
    _lost: set[str] = field(default_factory=set)
    _given: int = 0

    def serve(self, version: str) -> None:
        """Open a version, whose memory is whole from now on."""
        assert self.version is None, f"{self.version} is open"
        self.version = version
        self._confirmed.clear()
        self._lost.clear()

    def open(self, reader: str, version: str, now: float) -> str | None:
        """A lease; None if this version is not open. A reader that comes again begins anew."""
        if version != self.version:
            return None
        for lease in [lease for lease, name in self._reader.items() if name == reader]:
            self._end(lease)
        self._confirmed.discard(reader)
        self._lost.discard(reader)
        self._given += 1
        # Never given twice, so that a lease of an earlier version is known to be one.
        lease = f"{self._given}"
        self._reader[lease] = reader
        self._expires[lease] = now + self.lease_s
        return lease

    def renew(self, lease: str, now: float) -> bool:
        """Whether the reader may go on."""
        self._expire(now)
        if lease not in self._expires:
            return False
        self._expires[lease] = now + self.lease_s
        return True

    def confirm(self, lease: str, now: float) -> bool:
        """The reader has finished; whether all that it read is good: neither its lease nor the version had ended."""
        self._expire(now)
        if lease not in self._expires:
            return False
        self._confirmed.add(self._end(lease))
        return True

    def settled(self, readers: int, now: float) -> bool:
        """Whether so many readers have come and none is in the middle."""
        self._expire(now)
        return not self._expires and len(self._confirmed | self._lost) >= readers

    def next_end(self) -> float | None:
        """When the first lease ends that is not renewed."""
        return min(self._expires.values(), default=None)

    def close(self, now: float) -> Readers:
        """End the version and whoever still reads it: from now on nothing is confirmed."""
        self._expire(now)
        for lease in list(self._expires):
            self._lost.add(self._end(lease))
        self.version = None
        return Readers(frozenset(self._confirmed), frozenset(self._lost))

    def _expire(self, now: float) -> None:
        for lease in [lease for lease, end in self._expires.items() if end <= now]:
            self._lost.add(self._end(lease))

    def _end(self, lease: str) -> str:
        del self._expires[lease]
        return self._reader.pop(lease)
