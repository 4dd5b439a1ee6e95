"""A client's body as `body.py` has read it; `conditions.py`, `legs.py` and `fanout.py` work on it."""

from __future__ import annotations

import msgspec

from router.core.split.rules import Route
from router.core.split.values import Body, read_flag


class ClientBody(msgspec.Struct, frozen=True, kw_only=True):
    """A request body whose values are still the client's bytes."""

    route: Route
    fields: Body
    """Without the router's own, which are sent to no engine."""
    sampling: Body | None
    """The fields that say how to sample: `fields`, or on the generate route those of `sampling_params`; None where
    that is no object (the engine refuses it)."""
    size: int
    """Bytes of the whole body."""
    session_id: str | None
    request_id: str | None
    """The client's own `request_id`, echoed where it sent no header."""
    cache_salt: str | None
    wants_label: bool
    """The client asks which weights and replicas produced the reply."""

    @property
    def is_streaming(self) -> bool:
        return read_flag(self.fields.get("stream"))
