"""The stream that one client sees, over all the legs that its tokens come from.

`flow.py` opens it for each leg whose stream begins, and asks it to go on when an update ends that leg. With
`readmit_streams` off, or where a request can't be continued, a stream has one leg and is what the engine sends.
"""

from __future__ import annotations

from collections.abc import Callable

from router.core.continuable import tracked, why_not
from router.core.continuation import CannotContinue, Continuation, Ended, RelayedStream, continue_stream
from router.core.continued import Continued
from router.core.delivered import Delivered
from router.core.split import ClientBody, PrefillResult
from router.core.stream import StreamMerge

Relay = StreamMerge | RelayedStream
"""Feed a leg's bytes in, take the client's bytes out."""

_NOT_KEPT = "its tokens were not kept: the router's readmit_streams is off"


class ClientStream:
    """See the module text."""

    __slots__ = ("_body", "_delivered", "_kept", "_next", "asked", "begun", "relay")

    def __init__(self, body: ClientBody, *, kept: bool) -> None:
        self.begun = False
        """The client has seen bytes."""
        self.relay: Relay | None = None
        """Of the leg that streams now."""
        self.asked: ClientBody | None = tracked(body) if kept else None
        """What engines are asked so that the stream can go on later; None where it can't."""
        self._body = body
        self._kept = kept
        self._delivered: Delivered | None = None
        self._next: Continued | None = None

    def open(self, prefill: PrefillResult | None, label: Callable[[], bytes] | None) -> Relay:
        """A leg's stream begins."""
        merge = StreamMerge(prefill, label=label)
        self.begun = True
        self.relay = merge
        if self.asked is not None:
            self._delivered = self._delivered or Delivered(self._body, prefill)
            self.relay = RelayedStream(merge, self._next, self._delivered)
        return self.relay

    def go_on(self, version: str, label: bytes | None) -> Continuation | Ended | CannotContinue:
        """The leg that streamed under this version was ended: what comes next."""
        if self._delivered is None:
            return CannotContinue((why_not(self._body) if self._kept else None) or _NOT_KEPT)
        outcome = continue_stream(self._body, self._delivered, version=version, label=label)
        if isinstance(outcome, Continuation):
            self._next = outcome.stream
        return outcome
