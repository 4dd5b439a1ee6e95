"""An engine's own guard, loaded into vLLM's API server by `--middleware connectors.vllm_plugin.fence.Fence`.

vLLM's --api-key leaves the RL and development routes open, and knows nothing of epochs. The fence asks for the job's
bearer token on every route. What generates must name this instance and the confirmed epoch and be salted, and between
pause and resume it is refused; so a stale router, a probe, a warm-up or a restart behind the same port does no harm
(A41). `fence_rules.py` decides, this module carries out. `connectors/engine_argv.py` puts it on the command line,
`connectors/engine_client.py` and the router talk to it.

Pure ASGI: replies pass through piece by piece. Only the standard library is used, and nothing else of Headrace.
"""

from __future__ import annotations

import base64
import hmac
import json
import logging
import os
import re
import secrets
from collections.abc import Awaitable, Callable, Mapping, MutableMapping, Sequence
from pathlib import Path
from typing import Any

from connectors.vllm_plugin.fence_rules import (
    HANDOFFS_HEADER,
    INSTANCE_VARIABLE,
    LONGEST_COMMAND,
    TOKEN_FILE_VARIABLE,
    Answer,
    Command,
    FenceState,
    Headers,
    discard_refusal,
    error_answer,
    route_kind,
)
from connectors.vllm_plugin.pool_epoch import PoolEpoch
from connectors.vllm_plugin.unread import drop_while
from connectors.vllm_plugin.weight_routes import WeightRoutes
from connectors.vllm_plugin.weight_rules import LONGEST_WEIGHT_COMMAND

Message = MutableMapping[str, Any]
Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

POLICY_VIOLATION = 1008
"""Close code of a websocket that is refused."""

_INSTANCE = re.compile(r"[A-Za-z0-9._-]{1,64}")
_log = logging.getLogger("vllm.headrace.fence")
"""Below vLLM's own logger, whose handlers are the only ones that an engine has."""


class StartRefused(Exception):
    """The engine must not serve; the text says what to mend."""


def read_token(environment: Mapping[str, str]) -> bytes:
    """Raises `StartRefused` where there is none."""
    name = environment.get(TOKEN_FILE_VARIABLE)
    if not name:
        raise StartRefused(f"{TOKEN_FILE_VARIABLE} must name the file with the job's bearer token")
    try:
        token = Path(name).read_bytes().strip()
    except OSError as error:
        raise StartRefused(f"{TOKEN_FILE_VARIABLE}={name}: {error.strerror}") from error
    if not token:
        raise StartRefused(f"{TOKEN_FILE_VARIABLE}={name}: the file is empty")
    return token


def read_instance(environment: Mapping[str, str]) -> str:
    """The name of this life of the engine; a random one where none is given."""
    given = environment.get(INSTANCE_VARIABLE)
    if not given:
        return secrets.token_hex(16)
    if not _INSTANCE.fullmatch(given):
        raise StartRefused(f"{INSTANCE_VARIABLE} must be 1 to 64 letters, digits, dots, dashes and underscores")
    return given


class Fence:
    """The outermost middleware of one API server."""

    def __init__(self, app: App) -> None:
        self._app = app
        self._token = read_token(os.environ)
        self._state = FenceState(instance=read_instance(os.environ))
        self._pool = PoolEpoch(self._state)
        self._weights = WeightRoutes(self._state, self._pool)
        _log.info("fence: instance %s, closed until an epoch is confirmed", self._state.instance)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
        elif scope["type"] == "websocket":
            await self._websocket(scope, receive, self._labelled(send))
        else:
            await self._http(scope, receive, self._labelled(send))

    async def _http(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = dict(scope["headers"])
        if not self._has_token(headers):
            await _reply(send, error_answer(401, "authentication_error", "this engine needs the job's bearer token"))
            return
        kind = route_kind(scope["method"], _route_path(scope))
        if kind == "generating":
            await self._generate(scope, headers, receive, send)
        elif kind == "fence":
            await _reply(send, await self._own_route(scope, receive))
        elif kind == "weights":
            await _reply(send, await self._weight_route(scope, receive))
        elif kind == "vllm_weights":
            await _reply(send, await self._weights.vllm(scope["app"], _route_path(scope), self._whole(scope, receive)))
        elif kind == "discarding":
            await self._unless_it_discards(scope, receive, send)
        elif kind == "lora":
            message = "adapters are not loaded here: they change weights, and no epoch would say so"
            await _reply(send, error_answer(403, "permission_error", message))
        elif kind == "health" and (unfit := self._state.unfit()):
            await _reply(send, error_answer(503, "fenced", unfit, param="weights"))
        elif kind in ("pause", "resume") and (refusal := self._state.refused_move(headers)):
            await _reply(send, refusal)
        else:
            if kind == "pause":
                self._state.pause_received()
            elif kind == "resume":
                # Before the engine hears of it: what comes after has readers for its handoffs.
                self._state.resumes += 1
                send = self._opened_by_success(send)
            answer = self._app(scope, receive, send)
            if kind == "pause" and headers.get(HANDOFFS_HEADER.encode()) == b"drop":
                resumes = self._state.resumes
                client = scope["app"].state.engine_client
                answer = drop_while(client, answer, is_wanted=lambda: self._state.resumes == resumes)
            await answer

    async def _unless_it_discards(self, scope: Scope, receive: Receive, send: Send) -> None:
        body = await _whole_body(receive)
        if body is None:
            return
        if refusal := discard_refusal(_route_path(scope), scope["query_string"], _joined(body)):
            await _reply(send, refusal)
        else:
            await self._app(scope, _first(body, receive), send)

    async def _generate(self, scope: Scope, headers: Headers, receive: Receive, send: Send) -> None:
        if refusal := self._state.refusal(headers):
            await _reply(send, refusal)
            return
        body = await _whole_body(receive)
        if body is None:
            return
        # A body can be long under way. What its headers name was right when they came; it has to be right now as well.
        if refusal := self._state.refusal(headers):
            await _reply(send, refusal)
            return
        await self._run(scope, headers, _first(body, receive), send)

    async def _websocket(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = dict(scope["headers"])
        if self._has_token(headers) and self._state.refusal(headers) is None:
            await self._run(scope, headers, self._while_served(headers, receive), send)
        else:
            await send({"type": "websocket.close", "code": POLICY_VIOLATION})

    def _while_served(self, headers: Headers, receive: Receive) -> Receive:
        """A connection outlives pauses and epochs, and each of its messages can be a request: one that would be refused
        now ends it."""

        async def receive_or_end() -> Message:
            message = await receive()
            if self._state.refusal(headers) is None:
                return message
            return {"type": "websocket.disconnect", "code": POLICY_VIOLATION}

        return receive_or_end

    async def _run(self, scope: Scope, headers: Headers, receive: Receive, send: Send) -> None:
        number = self._state.accept(headers.get(b"x-request-id", b"").decode("latin-1"))
        try:
            await self._app(scope, receive, send)
        finally:
            self._state.end(number)

    async def _own_route(self, scope: Scope, receive: Receive) -> Answer:
        if scope["method"] == "GET":
            return Answer(200, self._state.view())
        if scope["method"] != "POST":
            return error_answer(405, "invalid_request_error", "/fence takes GET and POST")
        body = await _whole_body(receive, at_most=LONGEST_COMMAND)
        if body is None:
            return error_answer(400, "invalid_request_error", "the body did not arrive", param="body")
        before = self._state.epoch
        command = self._state.receive(_joined(body))
        if isinstance(command, Answer):
            return command
        problem = await self._move(scope["app"].state.engine_client, command)
        if self._state.epoch != before:
            _log.info("fence: the confirmed epoch is %s, before it was %s", self._state.epoch, before)
        if problem:
            return error_answer(500, "fenced", f"the ranks are not all in epoch {command.epoch}: {problem}")
        return Answer(200, self._state.view())

    async def _move(self, client: Any, command: Command) -> str:
        """Bring all ranks into the command's epoch, then open it. Returns why that failed."""
        if command.epoch is None:
            return await self._pool.move(client, None)
        self._state.weights_command = f"the move to epoch {command.epoch}"
        try:
            problem = await self._pool.move(client, command.epoch)
        finally:
            self._state.weights_command = ""
        if not problem:
            self._state.confirm(command)
        elif not self._state.lost:
            # Those that did move have to leave again.
            await self._pool.move(client, None)
        return problem

    async def _weight_route(self, scope: Scope, receive: Receive) -> Answer:
        body = await _whole_body(receive, at_most=LONGEST_WEIGHT_COMMAND)
        if body is None:
            return error_answer(400, "invalid_request_error", "the body did not arrive", param="body")
        return await self._weights.own(scope["app"], scope["method"], _route_path(scope), _joined(body))

    def _whole(self, scope: Scope, receive: Receive) -> Callable[[], Awaitable[Answer]]:
        """A call that lets the app answer, and returns its answer instead of sending it."""

        async def forward() -> Answer:
            messages: list[Message] = []

            async def keep(message: Message) -> None:
                messages.append(message)

            await self._app(scope, receive, keep)
            return _kept(messages)

        return forward

    def _has_token(self, headers: Headers) -> bool:
        scheme, _, given = headers.get(b"authorization", b"").partition(b" ")
        if scheme.lower() == b"basic":
            # Of a URL with a password, which is all that vLLM's weight sync client can be given.
            return hmac.compare_digest(_password(given), self._token)
        return scheme.lower() == b"bearer" and hmac.compare_digest(given.strip(), self._token)

    def _labelled(self, send: Send) -> Send:
        async def send_labelled(message: Message) -> None:
            if message["type"] in ("http.response.start", "websocket.accept"):
                message = {**message, "headers": [*message.get("headers", ()), *self._state.labels()]}
            await send(message)

        return send_labelled

    def _opened_by_success(self, send: Send) -> Send:
        pauses = self._state.pauses

        async def send_and_open(message: Message) -> None:
            if message["type"] == "http.response.start" and 200 <= message["status"] < 300:
                self._state.resumed(pauses)
            await send(message)

        return send_and_open


def _route_path(scope: Scope) -> str:
    """The path as the app's routes see it, without --root-path."""
    path: str = scope["path"]
    return path.removeprefix(scope.get("root_path", ""))


async def _whole_body(receive: Receive, at_most: int | None = None) -> list[Message] | None:
    """The messages of a request up to the end of its body, or just past `at_most` bytes; None where the client left.

    vLLM's handlers start with whole bodies too, so nothing is held longer for it.
    """
    messages: list[Message] = []
    size = 0
    while True:
        message = await receive()
        if message["type"] != "http.request":
            return None
        messages.append(message)
        size += len(message.get("body", b""))
        if not message.get("more_body", False) or (at_most is not None and size > at_most):
            return messages


def _joined(messages: Sequence[Message]) -> bytes:
    return b"".join(message.get("body", b"") for message in messages)


def _kept(messages: Sequence[Message]) -> Answer:
    """What an app sent, as an answer: vLLM's control routes all speak JSON."""
    status = next((message["status"] for message in messages if message["type"] == "http.response.start"), 500)
    text = _joined(messages)
    try:
        content = json.loads(text)
    except ValueError:
        content = {"detail": text.decode("utf-8", "replace")}
    return Answer(status, content if isinstance(content, dict) else {"detail": content})


def _password(credentials: bytes) -> bytes:
    try:
        return base64.b64decode(credentials, validate=True).partition(b":")[2]
    except ValueError:
        return b""


def _first(messages: Sequence[Message], receive: Receive) -> Receive:
    """Gives `messages` first, then what `receive` gives."""
    rest = iter(messages)

    async def receive_next() -> Message:
        message = next(rest, None)
        return await receive() if message is None else message

    return receive_next


async def _reply(send: Send, answer: Answer) -> None:
    body = json.dumps(answer.content).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body)), *answer.headers]
    await send({"type": "http.response.start", "status": answer.status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
