"""`python -m router.main --config router.json`: the router process.

Reads the settings that the plan wrote and the token file named by HEADRACE_TOKEN_FILE, wires core and shell
together, serves until SIGTERM or SIGINT, then lets open requests finish within `shutdown_grace_s`. A poller that fails
ends the process too: without it the router would go on routing by what it knew last.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib.util
import logging
import os
import signal
import sys
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from aiohttp import web
from pydantic import ValidationError

from router.core.fleet import Fleet
from router.core.gate import Gate
from router.io.admin import admin_app
from router.io.metrics import Metrics
from router.io.poller import Poller
from router.io.server import Services, public_app
from router.io.upstream import Upstream
from router.settings import TOKEN_FILE_VARIABLE, RouterSettings

_log = logging.getLogger("router")


class StartError(Exception):
    """The router can't start; the message says what to mend."""


class PollerFailed(Exception):
    """The router no longer knows its engines; the log has the reason."""


@dataclass(frozen=True, kw_only=True)
class RunningRouter:
    """A router that serves; ports as bound (0 in the settings lets the kernel choose)."""

    services: Services
    poller: Poller
    port: int
    internal_port: int


def load_settings(path: Path) -> RouterSettings:
    try:
        return RouterSettings.model_validate_json(path.read_bytes())
    except OSError as error:
        raise StartError(f"--config {path}: {error.strerror}") from error
    except ValidationError as error:
        raise StartError(f"--config {path}: {error}") from error


def load_token(environment: Mapping[str, str]) -> str:
    name = environment.get(TOKEN_FILE_VARIABLE)
    if not name:
        raise StartError(f"{TOKEN_FILE_VARIABLE} must name the file with the internal port's token")
    try:
        token = Path(name).read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise StartError(f"{TOKEN_FILE_VARIABLE}={name}: {error}") from error
    if not token:
        raise StartError(f"{TOKEN_FILE_VARIABLE}={name}: the file is empty")
    return token


@asynccontextmanager
async def running(settings: RouterSettings, token: str) -> AsyncIterator[RunningRouter]:
    """A router that serves while the context is open; leaving it drains."""
    async with AsyncExitStack() as stack:
        upstream = await stack.enter_async_context(Upstream(settings))
        services = Services(settings=settings, fleet=Fleet(settings), gate=Gate(), upstream=upstream, metrics=Metrics())
        services.fleet.report_losses(upstream.end_legs)
        poller = await stack.enter_async_context(Poller(settings, services.fleet, upstream))
        # Left in reverse: the public port drains first, while the internal one still answers.
        internal = await stack.enter_async_context(
            _listening(admin_app(services, token), settings.internal_host, settings.internal_port, grace_s=0.0)
        )
        public = await stack.enter_async_context(
            _listening(public_app(services), settings.host, settings.port, grace_s=settings.shutdown_grace_s)
        )
        yield RunningRouter(services=services, poller=poller, port=public, internal_port=internal)


@asynccontextmanager
async def _listening(app: web.Application, host: str, port: int, *, grace_s: float) -> AsyncIterator[int]:
    # handler_cancellation: a client that leaves ends its handler at once, also while the engine is silent.
    # Half: aiohttp waits for open requests twice as long, the second time after it ended those still being received.
    runner = web.AppRunner(app, access_log=None, handler_cancellation=True, shutdown_timeout=grace_s / 2)
    await runner.setup()
    try:
        await web.TCPSite(runner, host, port, backlog=4096).start()
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
        with asyncio.Runner(loop_factory=_loop_factory()) as runner:
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


def _loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    """uvloop where it is installed: the same behaviour for less CPU."""
    if importlib.util.find_spec("uvloop") is None:
        return None
    factory: Callable[[], asyncio.AbstractEventLoop] = importlib.import_module("uvloop").new_event_loop
    return factory


if __name__ == "__main__":
    sys.exit(main())
