"""What every request passes before it reaches a route: its token and what that may call (`access.py`), the size of its
body, and a net for what nobody foresaw. Answers are problems (`problems.py`)."""

from __future__ import annotations

import asyncio
import base64
import logging
from ipaddress import ip_address

from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from orchestrator.api.access import Access, includes, needed_role
from orchestrator.api.problems import problem_reply

_LOG = logging.getLogger(__name__)
MAX_BODY_BYTES = 1 << 20
TOO_LARGE = f"the body is larger than {MAX_BODY_BYTES} bytes; send a job file"
ENDING = "`headrace serve` ends before this is done; what was asked of it may go on: look again once it runs"


class Guard:
    """ASGI middleware."""

    def __init__(self, app: ASGIApp, access: Access) -> None:
        self._app = app
        self._access = access

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        refusal = self._refusal(scope)
        if refusal is not None:
            await refusal(scope, receive, send)
        else:
            await self._pass(scope, _limited(receive), send)

    def _refusal(self, scope: Scope) -> Response | None:
        method, path = scope["method"], scope["path"]
        needed = needed_role(method, path)
        if needed is None:
            return None
        role = self._access.role_of(_given_token(Headers(scope=scope)))
        if role is None:
            detail = "give a token of the API as a bearer token in the Authorization header"
            if self._access.where and _is_on_this_machine(scope):
                detail = f"{detail}; {self._access.where}"
            return problem_reply(path, 401, detail, headers={"www-authenticate": "Bearer"})
        if not includes(role, needed):
            return problem_reply(path, 403, f"this takes a token with the role {needed}, and yours is {role}")
        return None

    async def _pass(self, scope: Scope, receive: Receive, send: Send) -> None:
        has_begun = False

        async def watched(message: Message) -> None:
            nonlocal has_begun
            has_begun = True
            await send(message)

        try:
            await self._app(scope, receive, watched)
        except asyncio.CancelledError:
            # The server was told to end, and has waited for open replies. What has begun is cut off.
            if not has_begun:
                await problem_reply(scope["path"], 504, ENDING)(scope, receive, send)
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


def _is_on_this_machine(scope: Scope) -> bool:
    """As far as the caller's address tells."""
    host, _port = scope.get("client") or ("", 0)
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return False


def _given_token(headers: Headers) -> bytes:
    """A bearer token; or the password of a URL, which is all that vLLM's weight sync client can be given."""
    scheme, _, given = headers.get("authorization", "").partition(" ")
    if scheme.lower() == "bearer":
        return given.strip().encode()
    try:
        return base64.b64decode(given, validate=True).partition(b":")[2] if scheme.lower() == "basic" else b""
    except ValueError:
        return b""
