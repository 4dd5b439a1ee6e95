"""The public port: OpenAI routes, health, metrics, sessions.

Requests for engines go through `exchange.py`; what is answered here needs one look at the fleet. `main.py` runs the app
that `public_app` builds.
"""

from __future__ import annotations

import itertools
import logging
import secrets
import time
from dataclasses import dataclass

import msgspec
from aiohttp import web
from aiohttp.typedefs import Handler, Middleware

from router.core.fleet import Fleet, gate_message, not_ready_reason
from router.core.flow import Flow, FlowRules
from router.core.gate import Gate
from router.core.replies import Reply, error_reply, json_reply
from router.io.exchange import Exchange, ExchangeTools, to_response
from router.io.metrics import CONTENT_TYPE, Metrics
from router.io.upstream import Upstream
from router.settings import RouterSettings

_log = logging.getLogger(__name__)

GENERATING_ROUTES = ("/v1/completions", "/v1/chat/completions")
OTHER_ROUTE = "other"
"""The route label of all paths that don't exist here."""
CLIENT_GONE = 499


@dataclass(frozen=True, kw_only=True)
class Services:
    """What the handlers work with, built by `main.py`."""

    settings: RouterSettings
    fleet: Fleet
    gate: Gate
    upstream: Upstream
    metrics: Metrics


class _FinishSession(msgspec.Struct):
    session_id: str | int


class PublicRoutes:
    """One handler per route."""

    def __init__(self, services: Services) -> None:
        settings = services.settings
        self._services = services
        self._tools = ExchangeTools(fleet=services.fleet, upstream=services.upstream, metrics=services.metrics)
        self._rules = FlowRules(
            retries=settings.retries,
            request_timeout_s=settings.request_timeout_s,
            handoff_lifetime_s=settings.handoff_lease_s - settings.handoff_margin_s,
            session_fields=settings.session_fields,
        )
        self._session_headers = settings.session_headers
        # Unique among all routers that ever talked to these engines: engines remember ids after the reply.
        self._key_prefix = f"hr-{secrets.token_hex(8)}"
        self._numbers = itertools.count(1)

    async def generate(self, request: web.Request) -> web.StreamResponse:
        body = await request.read()
        flow = Flow(fleet=self._services.fleet, gate=self._services.gate, rules=self._rules)
        key = f"{self._key_prefix}-{next(self._numbers)}"
        exchange = Exchange(request, flow, self._tools, request_key=key)
        headers = request.headers
        session = next((headers[name] for name in self._session_headers if headers.get(name)), None)
        return await exchange.run(body, session)

    async def models(self, _request: web.Request) -> web.StreamResponse:
        services = self._services
        if not services.gate.may_continue:
            return to_response(error_reply(503, gate_message(services.gate)))
        for replica in services.fleet.usable():
            reply = await services.upstream.get(f"{replica.url}/v1/models", services.settings.probe_timeout_s)
            if reply is not None:
                return to_response(reply)
        return to_response(error_reply(503, "no usable engine to ask for its models"))

    async def health(self, _request: web.Request) -> web.StreamResponse:
        return to_response(json_reply({"status": "alive"}))

    async def ready(self, _request: web.Request) -> web.StreamResponse:
        reason = not_ready_reason(self._services.fleet, self._services.gate)
        return to_response(json_reply({"status": "ready"}) if reason is None else error_reply(503, reason))

    async def metrics(self, _request: web.Request) -> web.StreamResponse:
        text = self._services.metrics.render(self._services.fleet, self._services.gate)
        return to_response(Reply(status=200, body=text, content_type=CONTENT_TYPE))

    async def finish_session(self, request: web.Request) -> web.StreamResponse:
        try:
            asked: _FinishSession = msgspec.json.decode(await request.read(), type=_FinishSession)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            return to_response(error_reply(400, f"the body is not a session to finish: {error}", "session_id"))
        session_id = str(asked.session_id)
        self._services.fleet.finish_session(session_id)
        return to_response(json_reply({"session_id": session_id, "finished": True}))


async def not_found(request: web.Request) -> web.StreamResponse:
    """What answers every path and method that has no route."""
    return to_response(error_reply(404, f"no route {request.method} {request.path}"))


def public_app(services: Services) -> web.Application:
    """The app of the public port."""
    routes = PublicRoutes(services)
    app = web.Application(
        client_max_size=services.settings.max_body_bytes, middlewares=[_observe(services.metrics), json_errors]
    )
    for path in GENERATING_ROUTES:
        app.router.add_post(path, routes.generate)
    app.router.add_post("/finish_session", routes.finish_session)
    app.router.add_get("/v1/models", routes.models)
    app.router.add_get("/health", routes.health)
    app.router.add_get("/ready", routes.ready)
    app.router.add_get("/metrics", routes.metrics)
    app.router.add_route("*", "/{other:.*}", not_found)
    return app


@web.middleware
async def json_errors(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Errors that no handler turned into a reply, in the one form that clients get."""
    try:
        return await handler(request)
    except web.HTTPException as error:
        return to_response(error_reply(error.status, error.text or error.reason))
    except web.RequestPayloadError as error:
        return to_response(error_reply(400, f"the body cannot be read: {error}"))
    except ConnectionError:
        # The client left while something was written to it: nobody reads this, it is only counted.
        return web.Response(status=CLIENT_GONE)
    except Exception:
        _log.exception("%s failed", _route(request))
        return to_response(error_reply(500, "the router failed on this request; its log has the reason"))


def _observe(metrics: Metrics) -> Middleware:
    @web.middleware
    async def observe(request: web.Request, handler: Handler) -> web.StreamResponse:
        started, code = time.monotonic(), CLIENT_GONE
        try:
            response = await handler(request)
            code = response.status
            return response
        finally:
            metrics.request_done(_route(request), code, time.monotonic() - started)

    return observe


def _route(request: web.Request) -> str:
    """The template of the route: bounded, whatever clients ask for."""
    if request.match_info.handler is not_found or request.match_info.route.resource is None:
        return OTHER_ROUTE
    return request.match_info.route.resource.canonical
