"""Replies of the router's own making, in the OpenAI form that engines use too.

Built by `flow.py` (errors of one request) and by the shell's routes; written out by `io/exchange.py`.
"""

from __future__ import annotations

import msgspec

JSON = "application/json"

_ERROR_TYPES = {
    400: "BadRequestError",
    401: "AuthenticationError",
    404: "NotFoundError",
    408: "RequestTimeoutError",
    413: "RequestTooLargeError",
    417: "ExpectationFailedError",
    431: "RequestHeaderFieldsTooLargeError",
    500: "InternalServerError",
    501: "UnsupportedError",
    502: "BadGatewayError",
    503: "ServiceUnavailableError",
    504: "GatewayTimeoutError",
}

RETRY_AFTER_S = 1
"""What a client is told to wait before it asks again: the order of one health probe."""


class Reply(msgspec.Struct, frozen=True, kw_only=True):
    """One whole HTTP reply."""

    status: int
    body: bytes
    content_type: str = JSON
    headers: tuple[tuple[str, str], ...] = ()


def error_object(status: int, message: str, param: str | None = None) -> bytes:
    """`{"error": {...}}` as bytes; `code` is the HTTP status, as vLLM has it."""
    kind = _ERROR_TYPES.get(status, "BadRequestError" if status < 500 else "InternalServerError")
    return msgspec.json.encode({"error": {"message": message, "type": kind, "code": status, "param": param}})


def error_event(status: int, message: str) -> bytes:
    """An error inside a stream that has begun, wherever it broke off."""
    return b"\n\ndata: " + error_object(status, message) + b"\n\n"


def retry_headers(status: int) -> tuple[tuple[str, str], ...]:
    """What goes with a status that asks the client to come back."""
    return (("Retry-After", str(RETRY_AFTER_S)),) if status == 503 else ()


def error_reply(status: int, message: str, param: str | None = None) -> Reply:
    """An error as a reply. A 503 always says when to come back."""
    return Reply(status=status, body=error_object(status, message, param), headers=retry_headers(status))


def json_reply(content: object, status: int = 200) -> Reply:
    """Any JSON content as a reply."""
    return Reply(status=status, body=msgspec.json.encode(content))
