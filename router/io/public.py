"""The public port: OpenAI routes, vLLM's token route, health, metrics, sessions.

Requests that generate go through `exchange.py`; what is answered here needs one look at the dispatcher, or one question
to an engine. `main.py` and `worker.py` give `PublicPort.serve` to the HTTP server as its application.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import secrets
import time
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Annotated

import msgspec

from router.core.errors import RequestRefused
from router.core.events import Arrived
from router.core.finished import REPLAY_HEADER, FinishedRequests
from router.core.replies import Reply, error_reply, json_reply
from router.core.split import ROUTE_OF_PATH, Route, read_object
from router.io.exchange import CLIENT_GONE, Exchange, ExchangeTools
from router.io.http1.message import Request
from router.io.http1.server import Exchange as Watcher
from router.io.http1.server import Responder
from router.io.metrics import CONTENT_TYPE, Metrics
from router.io.overview import Overview
from router.io.recording import Recording
from router.io.upstream import EngineReply
from router.settings import RouterSettings

_log = logging.getLogger(__name__)

OTHER_ROUTE = "other"
"""The route label of all paths that don't exist here."""
MIN_VERSION_HEADER = b"x-headrace-min-version"
_REPLAY_HEADER = REPLAY_HEADER.encode()
_FORWARDED = (b"traceparent", b"tracestate")
"""Client headers that engines get too. Credentials and ids stay here."""

_Whole = Callable[[Request], Reply | Coroutine[None, None, Reply]]


class _FinishSession(msgspec.Struct):
    session_id: str | int


class _AbortRequests(msgspec.Struct, forbid_unknown_fields=True):
    request_ids: Annotated[list[str], msgspec.Meta(max_length=1000)] = []
    """Each is looked for among all open requests: more would hold up everybody else."""
    request_id: str | None = None


class PublicPort:
    """See the module text."""

    def __init__(
        self, settings: RouterSettings, tools: ExchangeTools, overview: Overview, finished: FinishedRequests | None
    ) -> None:
        self.metrics = tools.metrics
        self._finished = finished
        self._overview = overview
        self._numbers = tools.numbers
        self._settings = settings
        self._tools = tools
        self._session_headers = tuple(name.lower().encode("latin-1") for name in settings.session_headers)
        # Unique among all routers that ever talked to these engines: engines remember ids after the reply.
        self._key_prefix = f"hr-{secrets.token_hex(8)}"
        self._tasks: set[asyncio.Task[None]] = set()
        self._turns = itertools.count()
        self._whole: dict[tuple[str, str], _Whole] = {
            ("GET", "/v1/models"): self._ask_any,
            ("POST", "/tokenize"): self._ask_any,
            ("POST", "/detokenize"): self._ask_any,
            ("GET", "/health"): lambda _request: json_reply({"status": "alive"}),
            ("GET", "/ready"): self._ready,
            ("GET", "/metrics"): self._metrics,
            ("POST", "/finish_session"): self._finish_session,
            ("POST", "/abort_requests"): self._abort_requests,
        }

    def serve(self, request: Request, responder: Responder) -> Watcher | None:
        """The application of the HTTP server."""
        started = time.monotonic()
        if request.method == "HEAD":
            # The responder leaves out the body.
            request = msgspec.structs.replace(request, method="GET")
        route = ROUTE_OF_PATH.get(request.path)
        if route is not None and request.method == "POST":
            return self._generate(route, request, responder, started)
        answer = self._whole.get((request.method, request.path))
        whole = _WholeReply(responder, self.metrics, request.path if answer is not None else OTHER_ROUTE, started)
        reply = answer(request) if answer is not None else not_found(request.method, request.path)
        if isinstance(reply, Reply):
            whole.send(reply)
        else:
            whole.task = self._keep(self._await_reply(reply, whole))
        return whole

    def refused(self, status: int, _message: str) -> None:
        """The HTTP server has answered by itself."""
        self.metrics.request_done(OTHER_ROUTE, status, 0.0)

    def _generate(self, route: Route, request: Request, responder: Responder, started: float) -> Watcher:
        number, headers = next(self._numbers), request.headers
        asked_id, min_version = headers.get(b"x-request-id"), headers.get(MIN_VERSION_HEADER)
        session = None
        for name in self._session_headers:
            session = session or headers.get(name)
        forwarded = b""
        for name in _FORWARDED:
            if name in headers:
                forwarded += b"%b: %b\r\n" % (name, headers[name])
        arrived = Arrived(
            number=number,
            route=route,
            path=request.path,
            body=request.body,
            session_header=_text(session) if session else None,
            min_version=_text(min_version) if min_version else None,
            request_key=f"{self._key_prefix}-{number}",
            asked_id=_text(asked_id) if asked_id else None,
            forwarded=forwarded,
        )
        kept = self._finished
        if kept is not None and _REPLAY_HEADER not in headers and kept.wants(arrived.route, arrived.body):
            recording = Recording(responder, arrived, kept)
            exchange = recording.exchange = Exchange(recording, arrived, self._tools, started)
        else:
            exchange = Exchange(responder, arrived, self._tools, started)
        exchange.feed(arrived)
        return exchange

    # -- whole replies -------------------------------------------------------------------------------------

    async def _ready(self, _request: Request) -> Reply:
        reason = await self._overview.not_ready_reason()
        return json_reply({"status": "ready"}) if reason is None else error_reply(503, reason)

    async def _metrics(self, _request: Request) -> Reply:
        return Reply(status=200, body=await self._overview.metrics(), content_type=CONTENT_TYPE)

    async def _finish_session(self, request: Request) -> Reply:
        try:
            asked: _FinishSession = msgspec.json.decode(request.body, type=_FinishSession)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            return error_reply(400, f"the body is not a session to finish: {error}", "session_id")
        session_id = str(asked.session_id)
        await self._overview.finish_session(session_id)
        return json_reply({"session_id": session_id, "finished": True})

    async def _abort_requests(self, request: Request) -> Reply:
        """End requests by the ids that their clients gave them."""
        try:
            asked: _AbortRequests = msgspec.json.decode(request.body, type=_AbortRequests)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            return error_reply(400, f"the body does not name requests to abort: {error}", "request_ids")
        ids = [*asked.request_ids, *([asked.request_id] if asked.request_id is not None else [])]
        if not ids:
            return error_reply(400, "request_ids must name at least one request", "request_ids")
        unknown = [each for each in ids if not await self._overview.abort(each)]
        if unknown:
            return error_reply(404, f"no open request has the id {', '.join(map(repr, unknown))}", "request_ids")
        return json_reply({"aborted": ids})

    async def _ask_any(self, request: Request) -> Reply:
        """Pass a request that generates nothing to the usable engines in turn, to the next one where one fails."""
        if request.method == "POST":
            try:
                read_object(request.body)
            except RequestRefused as refused:
                return error_reply(400, refused.message, refused.param)
        path = request.path + (f"?{request.query}" if request.query else "")
        urls = await self._overview.usable_urls()
        first = next(self._turns) % len(urls) if urls else 0
        for url in urls[first:] + urls[:first]:
            reply = await self._tools.upstream.ask(
                request.method, url, path, self._settings.question_timeout_s, body=request.body
            )
            if isinstance(reply, EngineReply) and reply.status < 500:
                content_type = reply.headers.get(b"content-type", b"application/octet-stream").decode("latin-1")
                return Reply(status=reply.status, body=reply.body, content_type=content_type)
        reason = await self._overview.not_ready_reason()
        return error_reply(503, f"no usable engine answered {request.path}" + (f": {reason}" if reason else ""))

    async def _await_reply(self, reply: Coroutine[None, None, Reply], whole: _WholeReply) -> None:
        try:
            made = await reply
        except Exception:
            _log.exception("%s failed", whole.route)
            made = error_reply(500, "the router failed on this request; its log has the reason")
        whole.send(made)

    def _keep(self, work: Coroutine[None, None, None]) -> asyncio.Task[None]:
        task = self._tools.loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task


def _text(header: bytes) -> str:
    """What clients mean by a header: it has to equal the same text in a body."""
    try:
        return header.decode()
    except UnicodeDecodeError:
        return header.decode("latin-1")


def not_found(method: str, path: str) -> Reply:
    """What answers every path and method that has no route."""
    return error_reply(404, f"no route {method} {path}")


@dataclass(slots=True)
class _WholeReply:
    """A reply of the router's own, at once or from a task."""

    responder: Responder
    metrics: Metrics
    route: str
    started: float
    task: asyncio.Task[None] | None = None

    def send(self, reply: Reply) -> None:
        self.responder.reply(reply.status, [("Content-Type", reply.content_type), *reply.headers], reply.body)
        self._done(reply.status)

    def client_gone(self) -> None:
        self._done(CLIENT_GONE)
        if self.task is not None:
            self.task.cancel()

    def client_writable(self, writable: bool) -> None:
        """Whole replies are small."""

    def _done(self, status: int) -> None:
        self.metrics.request_done(self.route, status, time.monotonic() - self.started)
