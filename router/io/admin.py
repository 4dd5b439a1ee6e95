"""The internal port: the control plane reads the router's state and moves its gate.

Every route asks for the bearer token. `main.py` runs the app on a port of its own, so that nothing here can be reached
through the public one.
"""

from __future__ import annotations

import hmac

import msgspec
from aiohttp import web
from aiohttp.typedefs import Handler, Middleware

from router.core.gate import GateState
from router.core.replies import error_reply, json_reply
from router.io.exchange import to_response
from router.io.server import Services, json_errors, not_found


class _SetGate(msgspec.Struct, forbid_unknown_fields=True):
    gate: GateState


class AdminRoutes:
    """One handler per route."""

    def __init__(self, services: Services) -> None:
        self._services = services

    async def state(self, _request: web.Request) -> web.StreamResponse:
        fleet = self._services.fleet
        return to_response(
            json_reply(
                {
                    "job": self._services.settings.job,
                    "gate": self._services.gate.state,
                    "sessions": len(fleet.sessions),
                    "replicas": fleet.views(),
                }
            )
        )

    async def set_gate(self, request: web.Request) -> web.StreamResponse:
        try:
            asked: _SetGate = msgspec.json.decode(await request.read(), type=_SetGate)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            return to_response(error_reply(400, f"the body is not a gate state: {error}", "gate"))
        self._services.gate.set(asked.gate)
        return to_response(json_reply({"gate": self._services.gate.state}))


def admin_app(services: Services, token: str) -> web.Application:
    """The app of the internal port."""
    routes = AdminRoutes(services)
    app = web.Application(middlewares=[json_errors, _authorize(token)])
    app.router.add_get("/state", routes.state)
    app.router.add_post("/gate", routes.set_gate)
    app.router.add_route("*", "/{other:.*}", not_found)
    return app


def _authorize(token: str) -> Middleware:
    expected = f"Bearer {token}".encode()

    @web.middleware
    async def authorize(request: web.Request, handler: Handler) -> web.StreamResponse:
        given = request.headers.get("Authorization", "").encode("utf-8", "surrogateescape")
        if not hmac.compare_digest(given, expected):
            return to_response(error_reply(401, "this port needs the job's bearer token"))
        return await handler(request)

    return authorize
