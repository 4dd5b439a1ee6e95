"""Finished requests that are kept for an audit: which of them, and how many.

`io/recording.py` takes them from the client's own connection; `io/admin.py` shows them to the control plane
(`orchestrator/weights/audit.py`), which runs them again. A request is kept as its client sent it and as it was
answered: nothing is added to the one or taken out of the other. So only those can be audited whose clients ask for the
token ids and their log-probabilities, as RL rollouts do.
"""

from __future__ import annotations

from collections import deque
from typing import Literal

import msgspec

from router.core.split import Route

AuditOutcome = Literal["agrees", "disagrees", "unsteady", "skipped"]

REPLAY_HEADER = "x-headrace-replay"
"""Of an audit's own requests, which are not kept for another."""
KEPT_BYTES = 4 << 20
"""Of a body, and of a reply. A longer stream is kept up to there: its first tokens are what is compared."""
_LOGPROBS = b'"logprobs"'
_TOKEN_IDS = b'"return_token_ids"'


class FinishedRequest(msgspec.Struct, frozen=True, kw_only=True):
    """One request that was answered with success, all of it in one epoch."""

    id: str
    """Unique among all requests of this router."""
    route: Route
    body: bytes
    """The client's."""
    reply: bytes
    """What the client got: a JSON object, or the lines of a stream."""
    epoch: int
    version: str
    replicas: dict[str, str]
    """By part: prefill, decode."""


class FinishedRequests:
    """The last ones of this process."""

    def __init__(self, *, share: float, most: int) -> None:
        """`share` of the requests that can be audited, evenly."""
        self._share = share
        self._due = 0.0
        self._kept: deque[FinishedRequest] = deque(maxlen=most)

    def wants(self, route: Route, body: bytes) -> bool:
        """Is this one to be kept? Asked once for each request, as it arrives."""
        if len(body) > KEPT_BYTES or _LOGPROBS not in body or not (route == "generate" or _TOKEN_IDS in body):
            return False
        self._due += self._share
        if self._due < 1:
            return False
        self._due -= 1
        return True

    def add(self, finished: FinishedRequest) -> None:
        self._kept.append(finished)

    def all(self) -> list[FinishedRequest]:
        return list(self._kept)
