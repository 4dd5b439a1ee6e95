"""Values as the engines read them: 1, 1.0, "1" and true are one number, "yes" is true.

Everything that decides about a client's value reads it through here: a check that is stricter than the engine's would
let the engine see what the check did not.
"""

from __future__ import annotations

import re

import msgspec

Body = dict[str, msgspec.Raw]
"""The top level of a JSON object; its values are still the bytes that came."""

BODY: msgspec.json.Decoder[Body] = msgspec.json.Decoder(Body)
LIST: msgspec.json.Decoder[list[msgspec.Raw]] = msgspec.json.Decoder(list[msgspec.Raw])

_UNREADABLE = (msgspec.MsgspecError, RecursionError, UnicodeDecodeError)
_NOTHING = (msgspec.Raw(b"null"), msgspec.Raw())
_TRUE = frozenset(("1", "on", "t", "true", "y", "yes"))
_CONTAINER = (b"[", b"{")
_PROMPT = re.compile(rb'\s*(?:"[^"\\]*+(?:\\.[^"\\]*+)*+"|\[[^"\[\]]*+\])\s*[,\]]')
"""A text or a list of token ids within a list of prompts, and what separates it from the next."""


def is_null(raw: msgspec.Raw | None) -> bool:
    """Is the field absent, or null?"""
    return raw is None or raw in _NOTHING


def read(raw: msgspec.Raw | None) -> object:
    """The value; None where there is none that could be read."""
    if raw is None:
        return None
    try:
        return msgspec.json.decode(raw)
    except _UNREADABLE:
        return None


def is_scalar(raw: msgspec.Raw) -> bool:
    """Neither a list nor an object. Those can be as long as a body and cost ten times its parsing to read."""
    return bytes(memoryview(raw)[:1]) not in _CONTAINER


def read_flag(raw: msgspec.Raw | None) -> bool:
    """Does an engine read true?"""
    value = read(raw) if raw is not None and is_scalar(raw) else None
    if isinstance(value, str):
        return value.lower() in _TRUE
    return isinstance(value, int | float) and value == 1


def read_number(raw: msgspec.Raw | None) -> int | None:
    """The whole number that an engine reads; None where it reads none."""
    value = read(raw) if raw is not None and is_scalar(raw) else None
    if isinstance(value, str):
        value = _number_in(value)
    if isinstance(value, int):
        return int(value)
    return int(value) if isinstance(value, float) and value.is_integer() else None


def _number_in(text: str) -> int | float | None:
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return None


def count_prompts(raw: msgspec.Raw | None, *, at_most: int = 2) -> int:
    """How many prompts there are, counted no further than `at_most`; 1 for a text or a list of token ids."""
    if raw is None:
        return 0
    text = memoryview(raw)
    start = bytes(text[:64])
    if start[1:2].isdigit():
        return 1
    if not start.startswith(b"["):
        return 0 if start == b"null" else 1
    first = start[1:].lstrip()[:1] or bytes(text[1:]).lstrip()[:1]
    if first not in (b'"', b"[", b"]"):
        return 1
    at = 1
    for count in range(at_most):
        found = _PROMPT.match(text, at)
        if found is None:
            # An empty list, or nothing that engines take for a prompt.
            return len(LIST.decode(raw))
        at = found.end()
        if at == len(text):
            return count + 1
    return at_most
