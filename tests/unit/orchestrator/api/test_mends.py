"""What a caller is told to give instead, as the document has it."""

from __future__ import annotations

from typing import Any

import pytest

from orchestrator.api.mends import mend_of

SCHEMAS: dict[str, Any] = {
    "Push": {
        "type": "object",
        "properties": {
            "source": {"type": "object"},
            "strategy": {"anyOf": [{"type": "string", "enum": ["barrier", "rolling"]}, {"type": "null"}]},
            "limits": {"type": "array", "items": {"$ref": "#/components/schemas/Limit"}},
        },
        "required": ["source"],
    },
    "Limit": {"type": "number", "exclusiveMinimum": 0, "maximum": 60},
}
ROUTE: dict[str, Any] = {
    "parameters": [
        {"name": "wait", "in": "query", "schema": {"type": "boolean"}},
        {"name": "number", "in": "path", "schema": {"type": "integer", "minimum": 1, "exclusiveMaximum": 2**63}},
        {"name": "last-event-id", "in": "header", "schema": {"anyOf": [{"type": "integer"}, {"type": "null"}]}},
    ],
    "requestBody": {"content": {"application/json": {"schema": {"$ref": "#/components/schemas/Push"}}}},
}


@pytest.mark.parametrize(
    ("kind", "place", "mend"),
    [
        ("bool_parsing", ("query", "wait"), "give true or false"),
        ("int_parsing", ("path", "number"), "give an integer, at least 1"),
        ("int_parsing", ("header", "Last-Event-ID"), "give an integer or null"),
        ("missing", ("body", "source"), "give an object"),
        ("missing", ("body",), "give an object with source"),
        ("literal_error", ("body", "strategy"), 'give "barrier" or "rolling" or null'),
        ("float_type", ("body", "limits", 0), "give a number, above 0 and at most 60"),
        ("json_invalid", ("body", 17), "send well-formed JSON"),
        ("extra_forbidden", ("body", "strategie"), "did you mean 'strategy'?"),
        ("extra_forbidden", ("body", "x"), "known: source, strategy, limits"),
        ("value_error", ("body", "source", "deeper"), ""),
        ("missing", ("query", "unheard-of"), ""),
    ],
)
def test_a_mend(kind: str, place: tuple[str | int, ...], mend: str) -> None:
    assert mend_of(ROUTE, SCHEMAS, kind, place) == mend


def test_a_route_that_takes_nothing() -> None:
    assert mend_of({}, {}, "missing", ("body",)) == ""
