"""The workers of a router with more than one process on the public port.

The dispatcher stays in one process, which starts the workers, decides for all of them and asks them to do what concerns
every request: so sticky pins, load, limits, line and gate are exactly those of one process, whichever worker a client's
connection lands on. A request costs its worker one message there and one back per leg, small next to the bodies, which
never leave the worker.

A worker that dies takes its connections with it and nothing else: its requests leave the line, its legs are given back,
its counts stay in the sum, another takes its place.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import socket
import sys
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from typing import Any, TypeVar

import msgspec

from router.core.asks import Ask, Grant, LegEnd, Refusal
from router.core.events import HowInterrupted
from router.core.finished import FinishedRequest
from router.core.fleet import ReplicaLost
from router.core.gate import GateState
from router.io import wire
from router.io.desk import Desk
from router.io.metrics import Counts, Metrics, add_up, render
from router.io.serving import RunningLeg, Told
from router.io.start import StartError
from router.settings import RouterSettings

_log = logging.getLogger(__name__)

_START_TIMEOUT_S = 60.0
_MOST_WORKERS = 256
"""A request's number ends with its worker's."""
_REST_S = 1.0
"""Before a worker that died is replaced."""
_STOP_MARGIN_S = 5.0
_COUNTS_WAIT_S = 2.0
"""A worker that does not tell its counts within this is shown with those that it told last."""
_Value = TypeVar("_Value")


class _WorkerProcess:
    """One worker as its starter sees it."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.counts = Counts({}, {})
        self.requests: set[int] = set()
        self.tickets: set[int] = set()
        self.serves: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self.link: wire.Link
        self.process: asyncio.subprocess.Process


class Crew:
    """See the module text."""

    def __init__(self, settings: RouterSettings, token: str, counted: Metrics) -> None:
        """`counted`: by this process itself."""
        self._settings = settings
        self._token = token
        self._counted = counted
        self._workers: dict[int, _WorkerProcess] = {}
        self._retired = Counts({}, {})
        self._numbers: set[int] = set()
        self._stopping = False
        self._told: GateState = "frozen"
        """What workers know of the gate; one that starts is told the same."""
        self._tasks: set[asyncio.Task[None]] = set()
        self._replacing: set[asyncio.Task[None]] = set()
        self._ending: set[asyncio.Task[int]] = set()
        self._reserved: socket.socket | None = None
        self._port = 0
        self._desk: Desk

    async def start(self, desk: Desk) -> int:
        """Start all workers; the port that they share. StartError if one can't serve."""
        self._desk = desk
        self._reserved = reserved = _reserve(self._settings.host, self._settings.port)
        self._port = int(reserved.getsockname()[1])
        try:
            await asyncio.gather(*(self._start_worker() for _ in range(self._settings.workers)))
        except BaseException:
            await self.stop()
            raise
        return self._port

    async def stop(self) -> None:
        """Let every worker drain; end those that don't."""
        self._stopping = True
        for task in self._replacing:
            task.cancel()
        await asyncio.gather(*self._replacing, return_exceptions=True)
        workers = list(self._workers.values())
        for worker in workers:
            worker.link.send(wire.Stop())
        ends = [asyncio.create_task(worker.process.wait()) for worker in workers]
        if ends:
            _, late = await asyncio.wait(ends, timeout=self._settings.shutdown_grace_s + _STOP_MARGIN_S)
            for worker, end in zip(workers, ends, strict=True):
                if end in late:
                    worker.process.kill()
            await asyncio.wait(ends)
        if self._ending:
            await asyncio.wait(self._ending, timeout=_STOP_MARGIN_S)
        for task in self._tasks:
            task.cancel()
        if self._reserved is not None:
            self._reserved.close()

    # -- for the desk and the fleet ------------------------------------------------------------------------

    def decided(self, number: int, answer: Grant | Refusal) -> bool:
        """Tell a request that waited in line."""
        worker = self._worker_of(number)
        if worker is None:
            return False
        self._tell(worker, number, answer)
        return True

    def end_legs(self, lost: ReplicaLost) -> None:
        for worker in self._workers.values():
            worker.link.send(wire.Lost.of(lost))

    # -- the floor: all workers together -------------------------------------------------------------------

    async def gate_moved(self, state: GateState) -> None:
        self._told = state
        await self._ask_all(lambda number: wire.GateMoved(number, state), None)

    async def settle(self, timeout_s: float) -> list[str]:
        asked = await self._ask_all(lambda number: wire.Settle(number, timeout_s), list[str], takes_s=timeout_s)
        return _joined(asked)

    async def running(self) -> list[RunningLeg]:
        return _joined(await self._ask_all(wire.WantsRunning, list[RunningLeg]))

    async def interrupt(self, how: HowInterrupted, request_id: str | None = None) -> Told:
        told = await self._ask_all(lambda number: wire.Interrupt(number, how, request_id), Told)
        return Told(sum(each.requests for each in told), _joined(each.legs for each in told))

    async def ended(self, legs: list[RunningLeg], timeout_s: float) -> list[str]:
        question = functools.partial(wire.WantsEnded, legs=legs, timeout_s=timeout_s)
        asked = await self._ask_all(question, list[str], takes_s=timeout_s)
        return sorted(set(_joined(asked)))

    async def idle(self, url: str, timeout_s: float) -> list[str]:
        question = functools.partial(wire.WantsIdle, url=url, timeout_s=timeout_s)
        asked = await self._ask_all(question, list[str], takes_s=timeout_s)
        return sorted(set(_joined(asked)))

    async def finished(self) -> list[FinishedRequest]:
        return _joined(await self._ask_all(wire.WantsFinished, list[FinishedRequest]))

    async def metrics(self) -> bytes:
        """The exposition text: what all workers, and those before them, have counted."""
        await self._refresh_counts()
        counts = add_up([self._retired, self._counted.counts(), *(worker.counts for worker in self._workers.values())])
        return render(counts, self._desk.dispatcher)

    # -- workers -------------------------------------------------------------------------------------------

    async def _start_worker(self) -> None:
        number = next(each for each in range(_MOST_WORKERS) if each not in self._numbers)
        worker = _WorkerProcess(number)
        self._numbers.add(number)
        with contextlib.ExitStack() as undone:
            undone.callback(self._numbers.discard, number)
            ours, theirs = socket.socketpair()
            undone.callback(ours.close)
            with theirs:
                worker.process = await asyncio.create_subprocess_exec(
                    *(sys.executable, "-m", "router.io.worker", "--link", str(theirs.fileno())),
                    pass_fds=[theirs.fileno()],
                    stdin=asyncio.subprocess.DEVNULL,
                )
            ours.setblocking(False)
            link = wire.Link(wire.FromWorker, lambda message: self._take(worker, message), lambda: self._lost(worker))
            try:
                _, worker.link = await asyncio.get_running_loop().create_connection(lambda: link, sock=ours)
            except BaseException:
                worker.process.kill()
                await worker.process.wait()
                raise
            undone.pop_all()
        self._workers[worker.number] = worker
        settings = self._settings.model_dump_json().encode()
        worker.link.send(wire.Hello(worker.number, self._port, settings, self._token))
        worker.link.send(wire.GateMoved(0, self._told))
        try:
            async with asyncio.timeout(_START_TIMEOUT_S):
                await worker.serves
        except TimeoutError as error:
            worker.process.kill()
            message = f"a worker did not serve within {_START_TIMEOUT_S:g} s; its output is in this log"
            raise StartError(message) from error

    def _lost(self, worker: _WorkerProcess) -> None:
        """A worker is gone: give back what its requests held, and replace it."""
        self._workers.pop(worker.number, None)
        self._numbers.discard(worker.number)
        self._keep(worker.process.wait(), self._ending)
        self._retired = add_up([self._retired, worker.counts])
        for ticket in tuple(worker.tickets):
            self._desk.end_leg(LegEnd(ticket=ticket, outcome="cancelled"))
        for number in tuple(worker.requests):
            self._desk.leave(number)
        served = worker.serves.done() and not worker.serves.cancelled() and worker.serves.exception() is None
        if not worker.serves.done():
            worker.serves.set_exception(StartError("a worker ended before it served; its output is in this log"))
        if served and not self._stopping:
            _log.error("worker %d is gone with %d requests; another is started", worker.number, len(worker.requests))
            self._keep(self._replace(), self._replacing)

    async def _replace(self) -> None:
        while not self._stopping:
            await asyncio.sleep(_REST_S)
            try:
                await self._start_worker()
            except (StartError, OSError) as error:
                _log.error("no worker could be started: %s", error)
            else:
                return

    def _take(self, worker: _WorkerProcess, message: Any) -> None:
        match message:
            case Ask():
                worker.requests.add(message.request)
                answer = self._desk.ask(message)
                if answer is not None:
                    self._tell(worker, message.request, answer)
            case LegEnd():
                worker.tickets.discard(message.ticket)
                self._desk.end_leg(message)
            case wire.Left(number=number):
                worker.requests.discard(number)
                self._desk.leave(number)
            case wire.ByteSeen(replica=replica):
                self._desk.byte_seen(replica)
            case wire.Counted(counts=counts):
                worker.counts = counts
            case wire.FinishSession(session_id=session_id):
                self._desk.dispatcher.fleet.finish_session(session_id)
            case wire.Serves(port=port):
                if not worker.serves.done():
                    worker.serves.set_result(port)
            case wire.CantServe(reason=reason):
                if not worker.serves.done():
                    worker.serves.set_exception(StartError(f"can't listen: {reason}"))
            case _:
                self._keep(self._answer(worker, message), self._tasks)

    async def _answer(self, worker: _WorkerProcess, message: Any) -> None:
        value: object
        dispatcher = self._desk.dispatcher
        match message:
            case wire.WantsReason():
                value = dispatcher.not_ready_reason()
            case wire.WantsMetrics():
                value = await self.metrics()
            case wire.WantsUrls():
                members = dispatcher.fleet.members.values() if dispatcher.gate.may_continue else ()
                value = [member.url for member in members if member.usable]
            case wire.WantsAbort(request_id=request_id):
                value = (await self.interrupt("asked", request_id)).requests > 0
            case _:
                raise AssertionError(f"a message that is not for this process: {message}")
        worker.link.answer(message.question, value)

    def _tell(self, worker: _WorkerProcess, number: int, answer: Grant | Refusal) -> None:
        if isinstance(answer, Grant):
            worker.tickets.add(answer.ticket)
        worker.link.send(wire.Decided(number, answer))

    def _worker_of(self, number: int) -> _WorkerProcess | None:
        worker = self._workers.get(number % _MOST_WORKERS)
        return worker if worker is not None and number in worker.requests else None

    async def _refresh_counts(self) -> None:
        workers = list(self._workers.values())
        asked = (_or_none(asyncio.wait_for(each.link.ask(wire.WantsCounts), _COUNTS_WAIT_S)) for each in workers)
        answers = await asyncio.gather(*asked)
        for worker, answer in zip(workers, answers, strict=True):
            if answer is not None:
                worker.counts = msgspec.msgpack.decode(answer, type=Counts)

    async def _ask_all(self, question: Callable[[int], Any], kind: Any, *, takes_s: float = 0.0) -> list[Any]:
        """Ask every worker what may take it so long; one that ends meanwhile has nothing left to answer for."""
        limit_s = max(0.0, takes_s) + self._settings.worker_timeout_s
        answers = await asyncio.gather(*(self._ask(each, question, limit_s) for each in self._workers.values()))
        return [msgspec.msgpack.decode(answer, type=kind) for answer in answers if answer is not None]

    async def _ask(self, worker: _WorkerProcess, question: Callable[[int], Any], limit_s: float) -> bytes | None:
        """A worker's answer. One that does not give it is ended, for nobody could say what it still does."""
        try:
            return await asyncio.wait_for(worker.link.ask(question), limit_s)
        except ConnectionResetError:
            return None
        except TimeoutError:
            _log.error("worker %d has not answered within %g s and is ended", worker.number, limit_s)
            with contextlib.suppress(ProcessLookupError):  # another command may have waited in vain too
                worker.process.kill()
            await worker.process.wait()
            return None

    @staticmethod
    def _keep(work: Coroutine[Any, Any, _Value], tasks: set[asyncio.Task[_Value]]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        tasks.add(task)
        task.add_done_callback(tasks.discard)


async def _or_none(answer: Awaitable[bytes]) -> bytes | None:
    try:
        return await answer
    except (ConnectionResetError, TimeoutError):
        return None


def _joined(lists: Iterable[list[_Value]]) -> list[_Value]:
    return [each for one in lists for each in one]


def _reserve(host: str, port: int) -> socket.socket:
    """Bind the port without listening, so that the workers can share it and nobody else gets it meanwhile."""
    family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    made = socket.socket(family, kind, protocol)
    try:
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        made.bind(address)
    except OSError:
        made.close()
        raise
    return made
