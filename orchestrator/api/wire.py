"""What all wire models share."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import islice
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, ConfigDict

from orchestrator.spec.values import unusable_values

_MOST_COMPLAINTS = 10


class WireModel(BaseModel):
    """The text under a field goes into the OpenAPI document."""

    model_config = ConfigDict(use_attribute_docstrings=True)


class Note(WireModel):
    """One thing that is wrong."""

    field: str
    """Dotted, as it is written in the body; a part of the request where there is no body."""
    problem: str
    mend: str
    """May be empty."""


def _usable(value: Mapping[str, Any]) -> Mapping[str, Any]:
    complaints = [str(complaint) for complaint in islice(unusable_values(value), _MOST_COMPLAINTS)]
    if complaints:
        raise ValueError("; ".join(complaints))
    return value


OpenTable = Annotated[dict[str, Any], AfterValidator(_usable)]
"""Passed on as it is, so it may hold only what can be written down again and shown."""
