"""Whether two job files ask for the same, and where they do not."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from typing import Any

from orchestrator.errors import Complaint
from orchestrator.spec.job import JobSpec
from orchestrator.spec.secrets import without_secrets

_SHOWN_CHARS = 60


def asked_for(spec: JobSpec) -> dict[str, Any]:
    """What a job file says beyond the defaults; fields in the order of their names, however it is written."""
    said: dict[str, Any] = json.loads(json.dumps(spec.model_dump(mode="json", exclude_defaults=True), sort_keys=True))
    return said


def spec_hash(spec: JobSpec) -> str:
    """Equal for job files that ask for the same."""
    return hashlib.sha256(json.dumps(asked_for(spec)).encode()).hexdigest()


def differences(recorded: JobSpec, asked: JobSpec) -> tuple[Complaint, ...]:
    """A complaint per field, without secrets."""
    return tuple(_differences(asked_for(recorded), asked_for(asked), ()))


def _differences(recorded: Any, asked: Any, path: tuple[str, ...]) -> Iterator[Complaint]:
    tables = [side for side in (recorded, asked) if isinstance(side, Mapping)]
    if len(tables) == 2 or (any(tables) and None in (recorded, asked)):
        for key in sorted({*(recorded or {}), *(asked or {})}):
            yield from _differences((recorded or {}).get(key), (asked or {}).get(key), (*path, key))
    elif recorded != asked:
        name = path[-1] if path else ""
        problem = f"is {_shown(recorded, name)} in the recorded job, and {_shown(asked, name)} here"
        yield Complaint(field=".".join(path), problem=problem, mend="")


def _shown(value: Any, name: str) -> str:
    if value is None:
        return "not set"
    text = json.dumps(without_secrets(value, name))
    return text if len(text) <= _SHOWN_CHARS else f"{text[:_SHOWN_CHARS]}..."
