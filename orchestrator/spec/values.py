"""What no job file may hold, wherever it stands: values that could not be handed on to a program or written down.

Most engine arguments pass through unread, so a model of fields cannot refuse these. `load.py` looks first.
"""

from __future__ import annotations

import datetime
import math
from collections.abc import Iterator, Mapping

from orchestrator.errors import Complaint
from orchestrator.spec.secrets import LEFT_OUT, is_secret

_SHOWN_CHARS = 60
_SHOWN_FIELD_CHARS = 200
_MOST_LEVELS = 32
"""What reads and writes such values recurses, here and in other programs."""
_LARGEST_INTEGER = 2**63 - 1
"""TOML's own limit, which its Python reader does not keep."""


def unusable_values(value: object, field: str = "", level: int = 0) -> Iterator[Complaint]:
    """A complaint per value, or name, that cannot be used."""
    if level > _MOST_LEVELS:
        problem = f"lies more than {_MOST_LEVELS} tables or lists deep"
        yield Complaint(field=_printable(field), problem=problem, mend="nest less")
    elif isinstance(value, Mapping):
        for name, below in value.items():
            yield from unusable_values(name, field or "job", level)
            yield from unusable_values(below, f"{field}.{name}".lstrip("."), level + 1)
    elif isinstance(value, list | tuple):
        for index, below in enumerate(value):
            yield from unusable_values(below, f"{field}.{index}", level + 1)
    else:
        problem, mend = _problem(value, LEFT_OUT if is_secret(field) else "")
        if problem:
            yield Complaint(field=_printable(field), problem=problem, mend=mend)


def _problem(value: object, shown: str) -> tuple[str, str]:
    """`shown`: what to call the value; the value itself where empty."""
    match value:
        case str() if "\0" in value:
            return f"{shown or _printable(value)} holds a NUL character", "drop it: no program can be given one"
        case str() if not _is_text(value):
            return f"{shown or _printable(value)} is not valid text", "write it in UTF-8"
        case float() if not math.isfinite(value):
            return f"is {value}", "write a finite number"
        case int() if abs(value) > _LARGEST_INTEGER:
            return "is larger than any 64-bit number", "write a smaller one"
        case datetime.date() | datetime.time():
            return f"is a date or time ({value})", "write it in quotes"
        case _:
            return "", ""


def _is_text(value: str) -> bool:
    try:
        value.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True


def _printable(text: str) -> str:
    return ascii(text[:_SHOWN_CHARS]) if "\0" in text or not _is_text(text) else text[:_SHOWN_FIELD_CHARS]
