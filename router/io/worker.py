"""A process that serves the public port beside others: `python -m router.io.worker --link FD`.

Started by `crew.py` only, which tells it all it has to know over the inherited socket. It has the HTTP server, the
exchanges and the connections to engines; sessions, load and gate are with the process that started it, which it asks
over that socket. It ends when it is told to, or when that process is gone.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import msgspec

from router.core.asks import Ask, Grant, LegEnd, Refusal
from router.core.fleet import ReplicaLost
from router.core.gate import Gate
from router.io import wire
from router.io.exchange import Exchange
from router.io.http1.server import HttpServer
from router.io.metrics import Metrics
from router.io.public import PublicPort
from router.io.serving import Serving
from router.io.start import exchange_tools, http_limits, kept_for_audit, loop_factory, raise_open_files, tune_memory
from router.io.upstream import Upstream
from router.settings import RouterSettings

_log = logging.getLogger("router.worker")

TELL_COUNTS_EVERY_S = 1.0
_WORKERS_BITS = 8
_Value = TypeVar("_Value")


class RemoteDesk:
    """The dispatcher, asked over the link."""

    def __init__(self, link: wire.Link, serving: Serving) -> None:
        self._link = link
        self._serving = serving
        self.park = serving.park

    def ask(self, ask: Ask, exchange: Exchange) -> Grant | Refusal | None:
        self._serving.open[ask.request] = exchange
        self._link.send(ask)
        return None

    def end_leg(self, end: LegEnd) -> None:
        self._link.send(end)

    def leave(self, number: int) -> None:
        self._serving.open.pop(number, None)
        self._link.send(wire.Left(number))

    def byte_seen(self, replica: str) -> None:
        self._link.send(wire.ByteSeen(replica))


class RemoteOverview:
    """The whole router, asked over the link."""

    def __init__(self, link: wire.Link) -> None:
        self._link = link

    async def not_ready_reason(self) -> str | None:
        return await self._ask(wire.WantsReason, str | None)  # type: ignore[arg-type]

    async def metrics(self) -> bytes:
        return await self._ask(wire.WantsMetrics, bytes)

    async def finish_session(self, session_id: str) -> None:
        self._link.send(wire.FinishSession(session_id))

    async def abort(self, request_id: str) -> bool:
        return await self._ask(lambda number: wire.WantsAbort(number, request_id), bool)

    async def usable_urls(self) -> list[str]:
        return await self._ask(wire.WantsUrls, list[str])

    async def _ask(self, question: Callable[[int], Any], kind: type[_Value]) -> _Value:
        return msgspec.msgpack.decode(await self._link.ask(question), type=kind)


class Worker:
    """One worker process."""

    def __init__(self) -> None:
        self._hello: asyncio.Future[wire.Hello] = asyncio.get_running_loop().create_future()
        self._stop = asyncio.Event()
        self._abandoned = False
        self._counted = Metrics()
        self._tasks: set[asyncio.Task[None]] = set()
        self._link: wire.Link
        self._settings: RouterSettings
        self._upstream: Upstream
        self._serving: Serving
        """These three are there from `Hello` on, since other messages may follow it at once."""

    async def run(self, link_socket: socket.socket) -> int:
        """Serve until told to end; the exit code."""
        loop = asyncio.get_running_loop()
        for each in (signal.SIGTERM, signal.SIGINT):
            # Its starter gets these too and says when to end.
            loop.add_signal_handler(each, lambda: None)
        # There before the first message, which may come while the connection is still being made.
        self._link = wire.Link(wire.ToWorker, self._take, self._abandon)
        await loop.create_connection(lambda: self._link, sock=link_socket)
        hello = await self._hello
        settings, gate = self._settings, self._serving.gate
        async with self._upstream as upstream:
            desk = RemoteDesk(self._link, self._serving)
            tools = exchange_tools(settings, desk, gate, upstream, self._counted, _numbers(hello.worker), hello.token)
            public = PublicPort(settings, tools, RemoteOverview(self._link), self._serving.kept)
            server = HttpServer(public.serve, http_limits(settings), public.refused)
            try:
                bound = await server.start(settings.host, hello.port, reuse_port=True)
            except OSError as error:
                self._link.send(wire.CantServe(str(error)))
                await asyncio.sleep(0)
                return 1
            self._link.send(wire.Serves(bound))
            teller = loop.create_task(self._tell_counts())
            await self._stop.wait()
            teller.cancel()
            await server.drain(0.0 if self._abandoned else settings.shutdown_grace_s, self._serving.shut_down)
            self._link.send(wire.Counted(self._counted.counts()))
            await asyncio.sleep(0)
        self._link.close()
        return 1 if self._abandoned else 0

    def _abandon(self) -> None:
        self._abandoned = not self._stop.is_set()
        self._stop.set()

    async def _tell_counts(self) -> None:
        while True:
            await asyncio.sleep(TELL_COUNTS_EVERY_S)
            self._link.send(wire.Counted(self._counted.counts()))

    def _take(self, message: Any) -> None:
        match message:
            case wire.Decided(number=number, answer=answer):
                if not self._serving.decided(number, answer) and isinstance(answer, Grant):
                    self._link.send(LegEnd(ticket=answer.ticket, outcome="cancelled"))
            case wire.Lost(replica=replica, instance=instance, silent=silent):
                self._serving.end_legs(ReplicaLost(replica=replica, instance=instance, silent=silent))
            case wire.Hello(settings=settings, token=token):
                self._settings = RouterSettings.model_validate_json(settings)
                self._upstream = Upstream(self._settings, token)
                self._serving = Serving(Gate(), self._upstream, kept_for_audit(self._settings))
                self._hello.set_result(message)
            case wire.GateMoved(question=question, state=state):
                self._serving.gate_moved_to(state)
                self._link.answer(question, None)
            case wire.Stop():
                self._stop.set()
            case _:
                task = asyncio.get_running_loop().create_task(self._answer(message))
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)

    async def _answer(self, message: Any) -> None:
        value: object
        serving = self._serving
        match message:
            case wire.Interrupt(how=how, request_id=request_id):
                value = await serving.interrupt(how, request_id)
            case wire.Settle(timeout_s=timeout_s):
                value = await serving.settle(timeout_s)
            case wire.WantsRunning():
                value = await serving.running()
            case wire.WantsEnded(legs=legs, timeout_s=timeout_s):
                value = await serving.ended(legs, timeout_s)
            case wire.WantsIdle(url=url, timeout_s=timeout_s):
                value = await serving.idle(url, timeout_s)
            case wire.WantsFinished():
                value = await serving.finished()
            case wire.WantsCounts():
                value = self._counted.counts()
            case _:
                raise AssertionError(f"a message that no worker knows: {message}")
        self._link.answer(message.question, value)


def _numbers(worker: int) -> Iterator[int]:
    """Request numbers in the order of arrival over all workers: the machine's clock, then the worker."""
    last = 0
    while True:
        last = max(last + 1, time.monotonic_ns())
        yield last << _WORKERS_BITS | worker


async def _serve(link: socket.socket) -> int:
    return await Worker().run(link)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m router.io.worker", description=__doc__)
    parser.add_argument("--link", type=int, required=True, metavar="FD")
    link = socket.socket(fileno=parser.parse_args(argv).link)
    link.setblocking(False)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s worker %(name)s: %(message)s")
    tune_memory()
    raise_open_files()
    with asyncio.Runner(loop_factory=loop_factory()) as runner:
        return runner.run(_serve(link))


if __name__ == "__main__":
    sys.exit(main())
