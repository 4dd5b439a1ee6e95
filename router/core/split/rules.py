"""What a row of the split table can say. `fields.py` is the table, `legs.py` carries it out."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from router.core.split.client_body import ClientBody

Route = Literal["completions", "chat", "generate"]

ROUTE_OF_PATH: Mapping[str, Route] = {
    "/v1/completions": "completions",
    "/v1/chat/completions": "chat",
    "/inference/v1/generate": "generate",
}

Refusal = Callable[["ClientBody"], str | None]
"""Why the field can't be served on a handoff, with the mend; None where it can. Asked only if the field was sent and
is not null."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Treatment:
    """What one leg does with one field."""

    action: Literal["keep", "drop", "set", "set_if_sent"]
    value: bytes = b""


KEEP = Treatment(action="keep")
DROP = Treatment(action="drop")


def put(value: bytes) -> Treatment:
    """Set the field, whether it was sent or not."""
    return Treatment(action="set", value=value)


def replace(value: bytes) -> Treatment:
    """Set the field where it was sent."""
    return Treatment(action="set_if_sent", value=value)


@dataclass(frozen=True, kw_only=True, slots=True)
class FieldRule:
    """One row of the table. What is not said: the field passes, and its part of the reply is the decode leg's."""

    prefill: Treatment = KEEP
    decode: Treatment = KEEP
    refusal: Refusal | None = None
    refused_everywhere: bool = False
    """The refusal holds for an engine that does both legs, too: it is not about what one handoff can't serve."""
    merged: str | None = None
    """The reply's field that comes from the prefill leg, or is joined from both."""


PASS = FieldRule()
"""The same on both legs, and nothing to merge."""

SAMPLED_ON_DECODE = FieldRule(prefill=DROP)
"""It is about output, of which the prefill leg has one token that nobody reads."""
