"""pydantic's errors in the user's words. `load.py` uses it for the job file, `plan/resolve.py` for merged blocks."""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterator, Sequence
from typing import Any, get_args

from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from orchestrator.errors import Complaint
from orchestrator.spec.secrets import without_secrets

_SHOWN_CHARS = 120


def describe(detail: ErrorDetails, root: type[BaseModel]) -> Complaint:
    """A pydantic error as a complaint: the field, what is wrong with the value, the mend."""
    location = [str(part) for part in detail["loc"]]
    field = ".".join(location) or "job"
    if detail["type"] == "extra_forbidden":
        known = sorted(_fields_at(root, location[:-1]))
        return Complaint(field=field, problem="is no known key", mend=nearest(location[-1], known))
    if detail["type"] == "missing":
        return Complaint(field=field, problem="is missing", mend=f"add it{_to_hold(root, location)}")
    shown = json.dumps(without_secrets(detail["input"], location[-1] if location else ""), default=str)[:_SHOWN_CHARS]
    if detail["type"] == "string_pattern_mismatch":
        info = _fields_at(root, location[:-1]).get(location[-1]) if location else None
        return Complaint(field=field, problem=f"does not fit (was {shown})", mend=_first_words(info))
    if detail["type"] == "model_type":
        mend = f"write it as a table{_to_hold(root, location)}"
        return Complaint(field=field, problem=f"is no table (was {shown})", mend=mend)
    problem = detail["msg"].removeprefix("Value error, ")
    return Complaint(field=field, problem=f"{problem} (was {shown})", mend=_MENDS.get(detail["type"], ""))


def nearest(word: str, known: Sequence[str]) -> str:
    """The mend for an unknown key: the nearest known name, or all of them."""
    close = difflib.get_close_matches(word, known, n=1, cutoff=0.6)
    return f"did you mean {close[0]!r}?" if close else "known keys: " + ", ".join(sorted(known))


_MENDS = {
    "string_type": "write it in quotes",
    "dict_type": "write it as a table",
    "tuple_type": "write it as a list",
    "byte_size": 'write bytes as an integer, or for example "10GB" or "10GiB"',
    "byte_size_unit": 'write bytes as an integer, or for example "10GB" or "10GiB"',
}
"""For errors whose text states the rule but not what to write."""


def _to_hold(root: type[BaseModel], location: Sequence[str]) -> str:
    """What a table at this place cannot do without; empty for what is no table, or needs nothing."""
    fields = _fields_at(root, location[:-1])
    if not location or location[-1] not in fields:
        return ""
    models = _models_in(fields[location[-1]].annotation)
    needed = [key for model in models for key, each in model.model_fields.items() if each.is_required()]
    return f" with {' and '.join(needed)}" if needed else ""


def _first_words(info: FieldInfo | None) -> str:
    """A field's own text says what it takes."""
    text = info.description if info is not None else None
    return " ".join(text.split()) if text else ""


def _fields_at(root: type[BaseModel], path: Sequence[str]) -> dict[str, FieldInfo]:
    """The fields of the model at `path` below `root`; discriminator tags in the path name no field and are skipped."""
    models: list[type[BaseModel]] = [root]
    for part in path:
        fields = [model.model_fields[part].annotation for model in models if part in model.model_fields]
        models = [found for annotation in fields for found in _models_in(annotation)] or models
    return {key: info for model in models for key, info in model.model_fields.items()}


def _models_in(annotation: Any) -> Iterator[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for inner in get_args(annotation):
        yield from _models_in(inner)
