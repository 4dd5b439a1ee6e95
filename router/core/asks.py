"""What a request asks the dispatcher, and what it is told.

`flow.py` makes an `Ask` per leg, `dispatcher.py` answers it at once or later. All of it is plain data that can cross a
process border (`io/wire.py`): with several workers the dispatcher lives in another process than the flow.
"""

from __future__ import annotations

from typing import Literal, get_args

import msgspec

from router.core.table import LegFailure
from router.settings import EngineRole

Reason = Literal["new", "pinned", "moved_wait", "moved_full", "moved_failed", "moved_lost", "unpinned"]
"""Why a leg goes where it goes. new: the session's first leg of this role; pinned: where its last one went; moved_*:
elsewhere, because waiting there costs more than moving, it has no room, this request failed there, or it is gone;
unpinned: the policy has no pins."""

LegOutcome = Literal[
    "ok", "client_error", "cancelled", "expired", "unreachable", "broken", "timeout", "engine_error", "local"
]
"""How a leg ended. expired: it was never sent, its handoff had become too old on the way to the connection."""


_FAILURES: dict[LegOutcome, LegFailure] = {each: each for each in get_args(LegFailure)}


class Ask(msgspec.Struct, frozen=True, kw_only=True, array_like=True, tag=True):
    """A request wants a replica for its next leg."""

    request: int
    """Number of the request; unique in this router."""
    place: int
    """Its place in the line: the number of the client's request, of which it may be one sample."""
    serial: int
    """Number of this question among those of the request; its answer repeats it. One that answers an older question
    came too late and is given back."""
    session: str | None
    session_lasts: bool
    """False: the session has no name of the client's, and ends with its last open request."""
    tokens: int
    """Prompt tokens, estimated."""
    avoid: frozenset[str] = frozenset()
    """Replicas on which this request has failed: taken only where nothing else is left."""
    handoff_epoch: int | None = None
    """Set for a second leg: only a decode replica of this epoch will do. None: a first leg."""
    min_version: str | None = None
    """First legs only: the client wants weights committed at or after this version."""


class Grant(msgspec.Struct, frozen=True, kw_only=True, array_like=True, tag=True):
    """A replica is reserved; it is given back with the leg's end."""

    ticket: int
    serial: int
    role: EngineRole
    replica: str
    url: str
    instance: str
    """Empty where the replica's life has no name (an engine without a fence that was never told one)."""
    epoch: int
    version: str
    reason: Reason


class Refusal(msgspec.Struct, frozen=True, kw_only=True, array_like=True, tag=True):
    """No replica. A second leg may still be served in another way; see `Flow`."""

    serial: int
    kind: Literal["no_replica", "line_full", "waited_too_long", "no_pair"]
    message: str


class LegEnd(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """A leg is over and its ticket void."""

    ticket: int
    outcome: LegOutcome
    blamed: bool = True
    """May a failure count against the replica?"""
    seconds: float = 0.0
    cached_tokens: int | None = None
    """What the engine says that it did not have to compute."""
    handoff_from: str = ""
    """The prefill replica whose handoff it was to use, if any."""

    @property
    def failure(self) -> LegFailure | None:
        """The outcome as the table counts it; None if the replica did its part."""
        return _FAILURES.get(self.outcome)
