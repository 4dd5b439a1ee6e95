"""What mends a parameter or a body that does not fit its route: what the document says is accepted there. Pure.

`problems.py` asks, for what FastAPI has refused. Job files are none of that: their complaints have mends of their own.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from difflib import get_close_matches
from typing import Any

Schema = Mapping[str, Any]

LARGEST_TOLD = 1 << 53
"""Bounds beyond it are those of numbers, and no news to anybody."""
_WORDS = {
    "array": "a list",
    "boolean": "true or false",
    "integer": "an integer",
    "null": "null",
    "number": "a number",
    "object": "an object",
    "string": "a string",
}


def mend_of(operation: Schema, schemas: Mapping[str, Schema], kind: str, place: Sequence[str | int]) -> str:
    """`operation`: the route's, of the document; `schemas`: those that it refers to. `kind` and `place`: as pydantic
    calls the error, and where it found it. Empty where the document does not say."""
    if kind == "json_invalid":
        return "send well-formed JSON"
    # What is not known has no schema, but what it stands in has.
    is_unknown = kind == "extra_forbidden"
    schema = _schema_at(operation, schemas, place[:-1] if is_unknown else place)
    if schema is None:
        return ""
    if is_unknown:
        return _known_keys(schema, str(place[-1]))
    return f"give {' or '.join(dict.fromkeys(_accepted(schema, schemas)))}"


def _schema_at(operation: Schema, schemas: Mapping[str, Schema], place: Sequence[str | int]) -> Schema | None:
    where, *steps = place
    if where == "body":
        contents = operation.get("requestBody", {}).get("content", {}).values()
        schema = next((content["schema"] for content in contents), None)
    else:
        names = [str(step).lower() for step in steps[:1]]
        parameters = [each for each in operation.get("parameters", []) if each["in"] == where]
        schema = next((each["schema"] for each in parameters if each["name"].lower() in names), None)
        steps = steps[1:]
    for step in steps:
        schema = None if schema is None else _step(_resolved(schema, schemas), step)
    return None if schema is None else _resolved(schema, schemas)


def _step(schema: Schema, step: str | int) -> Schema | None:
    found = schema.get("items") if isinstance(step, int) else schema.get("properties", {}).get(step)
    return found if isinstance(found, Mapping) else None


def _resolved(schema: Schema, schemas: Mapping[str, Schema]) -> Schema:
    while "$ref" in schema:
        schema = schemas[schema["$ref"].rpartition("/")[2]]
    return schema


def _known_keys(schema: Schema, given: str) -> str:
    known = list(schema.get("properties", {}))
    close = get_close_matches(given, known, n=1)
    return f"did you mean {close[0]!r}?" if close else f"known: {', '.join(known)}"


def _accepted(schema: Schema, schemas: Mapping[str, Schema]) -> Iterator[str]:
    """Each alternative, in words."""
    schema = _resolved(schema, schemas)
    if "anyOf" in schema:
        for each in schema["anyOf"]:
            yield from _accepted(each, schemas)
    elif "enum" in schema or "const" in schema:
        yield from (json.dumps(value) for value in schema.get("enum", [schema.get("const")]))
    elif schema.get("type") == "object" and schema.get("required"):
        yield f"an object with {', '.join(schema['required'])}"
    else:
        yield _WORDS.get(schema.get("type", ""), "a value") + _bounds(schema)


def _bounds(schema: Schema) -> str:
    words = (
        ("minimum", "at least"),
        ("exclusiveMinimum", "above"),
        ("maximum", "at most"),
        ("exclusiveMaximum", "below"),
    )
    told = [f"{word} {schema[key]:g}" for key, word in words if abs(schema.get(key, LARGEST_TOLD)) < LARGEST_TOLD]
    return f", {' and '.join(told)}" if told else ""
