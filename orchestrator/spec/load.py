"""Text -> `JobSpec`. Comes before everything; `cli.py` and the API call it.

TOML and JSON say the same things: a dotted key in JSON ("cpu.num_bytes") means what it means in TOML, and a key given
twice is an error in both. Errors name the field as the user wrote it, the value, and, for an unknown key, the nearest
known one (`complaints.py`).
"""

from __future__ import annotations

import json
import tomllib
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from orchestrator.errors import Complaint, SpecError
from orchestrator.spec.complaints import describe
from orchestrator.spec.job import JobSpec
from orchestrator.spec.values import unusable_values

NAMES_WITH_DOTS = ("env", "master_flags")
"""Tables whose keys are other programs' names, which may hold dots."""

MOST_COMPLAINTS = 100
"""At a time: a body may hold tens of thousands of mistakes."""


def load_job_file(path: Path, overrides: Sequence[str] = ()) -> JobSpec:
    """Read a job file (.toml or .json) and apply "field=value" overrides, values in TOML's spelling.

    Raises:
        SpecError: with all complaints, not only the first; of very many with the first ones.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise _refusal(str(path), "file", str(error), "give a readable job file") from error
    data = parse_job_text(text, source=str(path), syntax="json" if path.suffix == ".json" else "toml")
    try:
        data = _undot(data, str(path))
        for override in overrides:
            _apply_override(data, override)
    except RecursionError as error:
        raise _too_deep(str(path)) from error
    return job_from_data(data, source=str(path))


def parse_job_text(text: str, *, source: str, syntax: str) -> dict[str, Any]:
    """The raw table of a job file; `syntax` is "toml" or "json".

    Raises:
        SpecError: the text is not well-formed, or not a table.
    """
    try:
        data = _parse_json(text) if syntax == "json" else tomllib.loads(text)
    except ValueError as error:
        raise _refusal(source, "syntax", str(error), f"write valid {syntax.upper()}") from error
    except RecursionError as error:
        raise _too_deep(source) from error
    if not isinstance(data, dict):
        problem = f"the top level is {type(data).__name__}, not a table"
        raise _refusal(source, "syntax", problem, 'write an object: {"name": ..., "model": ..., "roles": ...}')
    return data


def job_from_data(data: Mapping[str, Any], *, source: str) -> JobSpec:
    """Validate a raw table.

    Raises:
        SpecError: with all complaints.
    """
    try:
        table = _undot(data, source)
        unusable = list(islice(unusable_values(table), MOST_COMPLAINTS))
        if unusable:
            raise SpecError(source, unusable)
        return JobSpec.model_validate(table)
    except RecursionError as error:
        raise _too_deep(source) from error
    except ValidationError as error:
        raise SpecError(source, _complaints(error)) from error


def _complaints(error: ValidationError) -> list[Complaint]:
    complaints = [describe(detail, JobSpec) for detail in error.errors(include_url=False)[:MOST_COMPLAINTS]]
    if (left := error.error_count() - len(complaints)) > 0:
        complaints.append(Complaint(field="job", problem=f"has {left} more mistakes", mend="mend these first"))
    return complaints


def _refusal(source: str, field: str, problem: str, mend: str) -> SpecError:
    return SpecError(source, [Complaint(field=field, problem=problem, mend=mend)])


def _too_deep(source: str) -> SpecError:
    return _refusal(source, "syntax", "tables or lists are nested too deep", "nest less")


def _parse_json(text: str) -> Any:
    return json.loads(text, parse_constant=_no_constant, object_pairs_hook=_no_key_twice)


def _no_constant(name: str) -> float:
    raise ValueError(f"{name} is not a JSON number")


def _no_key_twice(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Plain JSON readers keep the last of two equal keys, silently."""
    table = dict(pairs)
    if len(table) < len(pairs):
        twice = Counter(name for name, _ in pairs).most_common(1)[0][0]
        raise ValueError(f"key {twice!r} is given twice")
    return table


def _undot(data: Mapping[str, Any], source: str) -> dict[str, Any]:
    """Expand dotted keys into tables, and merge what they share.

    Values of engine arguments are passed through to vLLM, so they stay as they are.
    """
    out: dict[str, Any] = {}
    for key, value in data.items():
        parts = _split(key)
        if isinstance(value, Mapping) and parts[-1] == "engine":
            inner: Any = _merged(((_split(name), below) for name, below in value.items()), source)
        elif isinstance(value, Mapping) and parts[-1] not in NAMES_WITH_DOTS and "engine" not in parts:
            inner = _undot(value, source)
        else:
            inner = value
        _merge(out, parts, inner, source)
    return out


def _merged(entries: Any, source: str) -> dict[str, Any]:
    table: dict[str, Any] = {}
    for parts, value in entries:
        _merge(table, parts, value, source)
    return table


def _split(field: str) -> list[str]:
    """Parts of a dotted name; what follows a table of foreign names is one part."""
    parts = field.split(".")
    for index, part in enumerate(parts[:-1]):
        if part in NAMES_WITH_DOTS:
            return [*parts[: index + 1], ".".join(parts[index + 1 :])]
    return parts


def _merge(table: dict[str, Any], parts: Sequence[str], value: Any, source: str, within: str = "") -> None:
    key, *rest = parts
    field = f"{within}.{key}".lstrip(".")
    if rest:
        below = table.setdefault(key, {})
        if not isinstance(below, dict):
            raise _refusal(source, field, "is given twice, once as a table", "keep one of the two")
        _merge(below, rest, value, source, field)
    elif key not in table:
        table[key] = dict(value) if isinstance(value, Mapping) else value
    elif isinstance(table[key], dict) and isinstance(value, Mapping):
        for inner_key, inner in value.items():
            _merge(table[key], [inner_key], inner, source, field)
    else:
        raise _refusal(source, field, "is given twice", "keep one of the two")


def _apply_override(data: dict[str, Any], override: str) -> None:
    """`roles.decode.replicas=2`: the value is TOML, or a bare string where it is not valid TOML."""
    field, separator, text = override.partition("=")
    if not separator or not field.strip():
        raise _refusal(
            "--set", "--set", f"{override!r} is not field=value", "write for example roles.decode.replicas=2"
        )
    *parents, last = _split(field.strip())
    table = data
    for part in parents:
        inner = table.setdefault(part, {})
        if not isinstance(inner, dict):
            problem = f"{part} is {json.dumps(inner, default=str)} in the job file, not a table"
            raise _refusal("--set", field.strip(), problem, f"make {part} a table there, or set {part} itself")
        table = inner
    table[last] = _override_value(text)


def _override_value(text: str) -> Any:
    try:
        parsed = tomllib.loads(f"value = {text}")
    except tomllib.TOMLDecodeError:
        return text
    return parsed["value"] if len(parsed) == 1 else text
