"""`python -m router.main --config router.json`: the router process.

Reads the settings that the plan wrote and the token file named by HEADRACE_TOKEN_FILE, wires core and shell
together, serves until SIGTERM or SIGINT, then lets open requests finish within `shutdown_grace_s`. A poller that fails
ends the process too: without it the router would go on routing by what it knew last.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import logging
import os
import signal
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from aiohttp import web

from router.core.dispatcher import Dispatcher, Limits
from router.core.epochs import Epochs
from router.core.fleet import Fleet
from router.core.gate import Gate
from router.io.admin import AdminTools, admin_app
from router.io.crew import Crew
from router.io.desk import Desk, LocalDesk
from router.io.http1.server import HttpServer
from router.io.journal import Journal, read_journal
from router.io.metrics import Metrics
from router.io.overview import LocalOverview
from router.io.poller import Poller
from router.io.public import PublicPort
from router.io.serving import Serving
from router.io.start import (
    StartError,
    exchange_tools,
    http_limits,
    kept_for_audit,
    load_settings,
    load_token,
    loop_factory,
    raise_open_files,
    tune_memory,
)
from router.io.upstream import Upstream
from router.settings import RouterSettings

_log = logging.getLogger("router")


class PollerFailed(Exception):
    """The router no longer knows its engines; the log has the reason."""


@dataclass(frozen=True, kw_only=True)
class RunningRouter:
    """A router that serves; ports as bound (0 in the settings lets the kernel choose)."""

    dispatcher: Dispatcher
    poller: Poller
    port: int
    internal_port: int


@asynccontextmanager
async def running(settings: RouterSettings, token: str) -> AsyncIterator[RunningRouter]:
    """A router that serves while the context is open; leaving it drains."""
    loop = asyncio.get_running_loop()
    gate, fleet = Gate(), Fleet(settings)
    dispatcher = Dispatcher(fleet=fleet, gate=gate, epochs=Epochs(), limits=Limits.of(settings))
    async with AsyncExitStack() as stack:
        upstream = await stack.enter_async_context(Upstream(settings, token))
        counted = Metrics()
        floor: Crew | Serving
        if settings.workers == 1:
            floor = Serving(gate, upstream, kept_for_audit(settings))
        else:
            floor = Crew(settings, token, counted)
        desk = Desk(dispatcher, floor.decided, loop)
        if settings.session_journal is not None:
            path = Path(settings.session_journal)
            try:
                records = read_journal(path)
                desk.journal = stack.enter_context(Journal(path, fleet.sessions, records))
            except OSError as error:
                raise StartError(f"session_journal {path}: {error.strerror}") from error
            fleet.restore_sessions(records)
        fleet.report_losses(floor.end_legs)
        poller = await stack.enter_async_context(Poller(settings, desk, upstream))
        tools = AdminTools(job=settings.job, desk=desk, poller=poller, floor=floor, counted=counted)
        # Left in reverse: the public port drains first, while the internal one still answers.
        internal = await stack.enter_async_context(
            _listening(admin_app(tools, token), settings.internal_host, settings.internal_port)
        )
        if isinstance(floor, Crew):
            public = await floor.start(desk)
            stack.push_async_callback(floor.stop)
        else:
            server = _public_server(settings, desk, floor, upstream, counted, token)
            public = await server.start(settings.host, settings.port)
            stack.push_async_callback(server.drain, settings.shutdown_grace_s, floor.shut_down)
        yield RunningRouter(dispatcher=dispatcher, poller=poller, port=public, internal_port=internal)


def _public_server(
    settings: RouterSettings, desk: Desk, serving: Serving, upstream: Upstream, counted: Metrics, token: str
) -> HttpServer:
    """The public port of a router that is one process."""
    tools = exchange_tools(
        settings, LocalDesk(desk, serving), desk.dispatcher.gate, upstream, counted, itertools.count(1), token
    )
    overview = LocalOverview(desk.dispatcher, serving, counted)
    port = PublicPort(settings, tools, overview, serving.kept)
    return HttpServer(port.serve, http_limits(settings), port.refused)


@asynccontextmanager
async def _listening(app: web.Application, host: str, port: int) -> AsyncIterator[int]:
    runner = web.AppRunner(app, access_log=None, handler_cancellation=True, shutdown_timeout=0.0)
    await runner.setup()
    try:
        await web.TCPSite(runner, host, port).start()
        yield int(runner.addresses[0][1])
    finally:
        await runner.cleanup()


async def serve(settings: RouterSettings, token: str) -> None:
    """Serve until asked to stop; PollerFailed where a poller failed first."""
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for each in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(each, stop.set)
    async with running(settings, token) as router:
        _log.info("job %s: serving on port %d, internal port %d", settings.job, router.port, router.internal_port)
        async with asyncio.TaskGroup() as waits:
            asked = waits.create_task(stop.wait())
            failed = waits.create_task(router.poller.failed.wait())
            await asyncio.wait((asked, failed), return_when=asyncio.FIRST_COMPLETED)
            asked.cancel()
            failed.cancel()
        if router.poller.failed.is_set():
            raise PollerFailed
        _log.info("draining for up to %g s", settings.shutdown_grace_s)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m router.main", description="The data plane of one Headrace job.")
    parser.add_argument("--config", type=Path, required=True, metavar="FILE", help="router.json as the plan wrote it")
    arguments = parser.parse_args(argv)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    try:
        settings, token = load_settings(arguments.config), load_token(os.environ)
        tune_memory()
        raise_open_files()
        with asyncio.Runner(loop_factory=loop_factory()) as runner:
            runner.run(serve(settings, token))
    except StartError as error:
        sys.stderr.write(f"router: {error}\n")
        return 2
    except PollerFailed:
        sys.stderr.write("router: a poller failed; its traceback is in the log\n")
        return 3
    except OSError as error:
        sys.stderr.write(f"router: can't listen: {error}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
