"""Runs an ASGI app behind a real server, on a port of its own, in a thread."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import uvicorn

START_LIMIT_S = 10


class Forwarder:
    """Passes requests on to whatever app it holds, so that many tests can share one server."""

    app: Any = None

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "lifespan":
            await self.app(scope, receive, send)
            return
        for moment in ("startup", "shutdown"):
            await receive()
            await send({"type": f"lifespan.{moment}.complete"})


@contextmanager
def serving(app: Any) -> Iterator[httpx.Client]:
    """A client of the app that keeps to one connection."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        server = uvicorn.Server(uvicorn.Config(app, log_config=None, ws="none", timeout_graceful_shutdown=5))
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
        thread.start()
        try:
            deadline = time.monotonic() + START_LIMIT_S
            while not server.started:
                assert time.monotonic() < deadline
                time.sleep(0.005)
            url = f"http://127.0.0.1:{listener.getsockname()[1]}"
            limits = httpx.Limits(max_connections=1, max_keepalive_connections=1)
            with httpx.Client(base_url=url, limits=limits, timeout=20, trust_env=False, verify=False) as client:
                yield client
        finally:
            server.should_exit = True
            thread.join()


def local_port(reply: httpx.Response) -> int:
    """Our end of the connection that the reply came over: equal for two replies over one connection."""
    return int(reply.extensions["network_stream"].get_extra_info("client_addr")[1])
