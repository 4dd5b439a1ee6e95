"""What every request passes before it reaches a route: its token, the size of its body, and a net for what nobody
foresaw. Answers are problems (`problems.py`)."""

from __future__ import annotations

import base64
import logging
import secrets

from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from orchestrator.api.problems import problem_reply

_LOG = logging.getLogger(__name__)
OPEN_PATHS = ("/health",)
MAX_BODY_BYTES = 1 << 20
TOO_LARGE = f"the body is larger than {MAX_BODY_BYTES} bytes; send a job file"


class Guard:
    """ASGI middleware."""

    def __init__(self, app: ASGIApp, token: str | None) -> None:
        self._app = app
        self._token = token

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        if not self._knows(scope):
            refusal = problem_reply(
                scope["path"],
                401,
                "give the API token as a bearer token in the Authorization header",
                headers={"www-authenticate": "Bearer"},
            )
            await refusal(scope, receive, send)
            return
        await self._pass(scope, _limited(receive), send)

    def _knows(self, scope: Scope) -> bool:
        if self._token is None or scope["path"] in OPEN_PATHS:
            return True
        return secrets.compare_digest(_given_token(Headers(scope=scope)), self._token.encode())

    async def _pass(self, scope: Scope, receive: Receive, send: Send) -> None:
        has_begun = False

        async def watched(message: Message) -> None:
            nonlocal has_begun
            has_begun = True
            await send(message)

        try:
            await self._app(scope, receive, watched)
        except Exception as error:
            # An exception that reached the server would have it drop the connection.
            _LOG.exception("%s %r", scope["method"], scope["path"])
            if has_begun:
                raise
            detail = f"unexpected {type(error).__name__}; the log of `headrace serve` says more"
            await problem_reply(scope["path"], 500, detail)(scope, receive, send)


def _limited(receive: Receive) -> Receive:
    """The rest of a body that is too large is not read."""
    received = 0

    async def limited() -> Message:
        nonlocal received
        message = await receive()
        received += len(message.get("body", b""))
        if received > MAX_BODY_BYTES:
            raise HTTPException(413, TOO_LARGE)
        return message

    return limited


def _given_token(headers: Headers) -> bytes:
    """A bearer token; or the password of a URL, which is all that vLLM's weight sync client can be given."""
    scheme, _, given = headers.get("authorization", "").partition(" ")
    if scheme.lower() == "bearer":
        return given.strip().encode()
    try:
        return base64.b64decode(given, validate=True).partition(b":")[2] if scheme.lower() == "basic" else b""
    except ValueError:
        return b""
