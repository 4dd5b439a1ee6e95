"""The client's body: its fields with their values as they came, and what the router itself reads of it.

`flow.py` parses every body once; `conditions.py`, `legs.py` and `fanout.py` work on the result.
"""

from __future__ import annotations

import msgspec

from router.core.errors import RequestRefused
from router.core.split.client_body import ClientBody
from router.core.split.numbers import CUT, cut_numbers
from router.core.split.rules import Route
from router.core.split.values import BODY, Body, is_null, is_scalar, read, read_flag

LABEL_FIELD = "return_headrace"
"""The router's own: say in the reply what produced it."""

_ID_FIELD = "request_id"
"""The router's own as well: engines take the id of an attempt from the X-Request-Id header; a client's id may be in use
twice."""

SALT_FIELD = "cache_salt"
SAMPLING_FIELD = "sampling_params"
"""Where the generate route has what the others have at the top level."""

_CUT = msgspec.Raw(CUT)
_SESSION_LENGTH = 256
"""Characters; a pin is kept for each session, and the id with it."""
_SALT_LENGTH = 128
_NOT_IN_A_SALT = frozenset("@/\\\0")
_TOKENS: dict[Route, tuple[str, bytes] | None] = {
    "completions": ("prompt", b'"prompt"'),
    "chat": None,
    "generate": ("token_ids", b'"token_ids"'),
}
"""The field that can be a long list of token ids, and how its key is written."""


def parse_body(raw: bytes, *, route: Route, session_header: str | None, session_fields: tuple[str, ...]) -> ClientBody:
    """Read a body's top level; refuse what is not a JSON object in UTF-8, and what the router can't go by."""
    fields = read_object(raw, _TOKENS[route])
    in_body = _session_id(fields, session_fields)
    request_id, label = fields.pop(_ID_FIELD, None), fields.pop(LABEL_FIELD, None)
    return ClientBody(
        route=route,
        fields=fields,
        sampling=_sampling(fields) if route == "generate" else fields,
        size=len(raw),
        session_id=_session_in_header(session_header) or in_body,
        request_id=_text(request_id) if request_id is not None else None,
        cache_salt=_cache_salt(fields.get(SALT_FIELD)),
        wants_label=label is not None and read_flag(label),
    )


def read_object(raw: bytes, tokens: tuple[str, bytes] | None = None) -> Body:
    """The top level of a JSON object in UTF-8; anything else is refused. `tokens`: the field that can be a long list of
    token ids, and its key."""
    try:
        if not raw.isascii():
            # Values are not decoded, so nothing else would look at their encoding.
            raw.decode("utf-8")
        return _decode(raw, tokens)
    except UnicodeDecodeError as error:
        raise RequestRefused(f"the body is not valid UTF-8: byte {error.start}", param=None) from error
    except (msgspec.MsgspecError, RecursionError) as error:
        raise RequestRefused(f"the body is not a JSON object: {error}", param=None) from error


def _decode(raw: bytes, tokens: tuple[str, bytes] | None) -> Body:
    if tokens is not None:
        name, key = tokens
        rest, numbers = cut_numbers(raw, key)
        if numbers is not None:
            fields = BODY.decode(rest)
            if fields.get(name) == _CUT:
                fields[name] = msgspec.Raw(numbers)
                return fields
            # The name also stands somewhere else, inside another value or twice.
    return BODY.decode(raw)


def _sampling(fields: Body) -> Body | None:
    raw = fields.get(SAMPLING_FIELD)
    return read_object(bytes(raw)) if raw is not None and bytes(memoryview(raw)[:1]) == b"{" else None


def _session_in_header(value: str | None) -> str | None:
    if value is not None and len(value) > _SESSION_LENGTH:
        message = f"the session id in the request's header must be at most {_SESSION_LENGTH} characters long"
        raise RequestRefused(message, param="session_id")
    return value


def _session_id(fields: Body, names: tuple[str, ...]) -> str | None:
    """Take the session fields out; what the first of them says that says something."""
    found = None
    for name in names:
        raw = fields.pop(name, None)
        if raw is None or found is not None or bytes(raw) in (b"null", b'""'):
            continue
        value = read(raw) if is_scalar(raw) else None
        if isinstance(value, bool) or not isinstance(value, str | int):
            raise RequestRefused(f"{name} must be a string or an integer", param=name)
        found = str(value)
        if len(found) > _SESSION_LENGTH:
            raise RequestRefused(f"{name} must be at most {_SESSION_LENGTH} characters long", param=name)
    return found


def _cache_salt(raw: msgspec.Raw | None) -> str | None:
    """The salt, within the limits that the engines set."""
    if is_null(raw):
        return None
    salt = _text(raw)
    if salt is None or len(salt) > _SALT_LENGTH or not _NOT_IN_A_SALT.isdisjoint(salt):
        message = f"{SALT_FIELD} must be a text of 1 to {_SALT_LENGTH} characters without '@', '/', '\\' and NUL"
        raise RequestRefused(message, param=SALT_FIELD)
    return salt


def _text(raw: msgspec.Raw | None) -> str | None:
    value = read(raw) if raw is not None and is_scalar(raw) else None
    return value if isinstance(value, str) and value else None
