"""What all wire models share."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


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
