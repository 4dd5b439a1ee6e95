"""A stub engine that can be paused and takes new weights: the fence's own rules over ranks that are one attribute."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

from aiohttp import web

from connectors.vllm_plugin.fence_rules import Answer, FenceState
from connectors.vllm_plugin.pool_epoch import PoolEpoch
from connectors.vllm_plugin.weight_metrics import PARTS
from connectors.vllm_plugin.weight_routes import WeightRoutes
from connectors.vllm_plugin.weights.settings import BACKEND, WORKER_EXTENSION
from connectors.vllm_plugin.weights.verdict import LoadResult, RankReport
from tests.fakes.stub_engine import StubEngine

NUMBERS: dict[str, Any] = {**dict.fromkeys(PARTS, 0.0), "bytes": 0, "peak_extra_bytes": 0}


class Rank:
    """Stands for vLLM's engine client and for the one rank behind it."""

    def __init__(self) -> None:
        parallel = SimpleNamespace(world_size=1, worker_extension_cls=WORKER_EXTENSION)
        transfer = SimpleNamespace(backend=BACKEND)
        self.vllm_config = SimpleNamespace(parallel_config=parallel, weight_transfer_config=transfer)
        self.report = RankReport(call="", rank=0, ranks=1, ok=True)
        self.epochs: list[int | None] = []
        """Of its pool, in their order."""
        self.fails = ""
        """Why loads fail before anything is written; empty: they do not."""
        self.gone: set[str] = set()
        """Transports from which nothing can be loaded."""
        self.prefetches: list[dict[str, Any]] = []
        self.loads: list[dict[str, Any]] = []
        """The commands, as they came."""

    async def collective_rpc(self, method: str, timeout: float, args: tuple[Any, ...]) -> list[Any]:
        report = self.report
        report.ok, report.error = True, ""
        if method == "headrace_pool":
            report.call = args[0]
            self.epochs.append(args[1])
        else:
            self._obey(args[0])
        return [report.to_wire()]

    def _obey(self, command: dict[str, Any]) -> None:
        report, version = self.report, command["source"].get("version")
        report.call = command["call"]
        if command["name"] == "prefetch":
            self.prefetches.append(command)
            report.phase, report.prefetched = "prefetched", version
        elif command["name"] == "serve":
            report.served = {"transport": "nixl", "version": report.version, "host": "127.0.0.1", "port": 1}
        elif command["name"] == "load":
            transport = command["source"]["transport"]
            self.loads.append(command)
            error = f"{transport}: nothing is there" if transport in self.gone else self.fails
            report.ok, report.error, report.served = not error, error, None
            report.version = report.version if error else version
            report.last_load = LoadResult(ok=report.ok, version=version, error=error, numbers=NUMBERS)

    async def reset_mm_cache(self) -> None:
        """Nothing is kept."""

    async def update_weight_version(self, version: str) -> None:
        """The report has it."""


@dataclass
class UpdatableEngine(StubEngine):
    paused: bool = False
    pauses: list[dict[str, str]] = field(default_factory=list)
    """The queries of all that were obeyed."""
    rank: Rank = field(default_factory=Rank)

    def __post_init__(self) -> None:
        self.fence = self.fence or FenceState(instance=f"{self.name}.a")
        self._weights = WeightRoutes(self.fence, PoolEpoch(self.fence))

    @property
    def closed(self) -> FenceState:
        assert self.fence is not None
        return self.fence

    def add_routes(self, app: web.Application) -> None:
        app.router.add_post("/fence", self._confirm)
        app.router.add_post("/pause", self._pause)
        app.router.add_post("/resume", self._resume)
        app.router.add_get("/is_paused", self._is_paused)
        app.router.add_route("*", "/weights/{name}", self._weight_route)

    async def _confirm(self, request: web.Request) -> web.Response:
        command = self.closed.receive(await request.read())
        if isinstance(command, Answer):
            return _respond(command)
        self.closed.confirm(command)
        return web.json_response(self.closed.view())

    async def _pause(self, request: web.Request) -> web.Response:
        if refusal := self._refused_move(request):
            return refusal
        self.closed.pause_received()
        self.paused = True
        self.pauses.append(dict(request.query))
        return web.json_response({"status": "paused"})

    async def _resume(self, request: web.Request) -> web.Response:
        if refusal := self._refused_move(request):
            return refusal
        self.closed.resumed(self.closed.pauses)
        self.paused = False
        return web.json_response({"status": "resumed"})

    def _refused_move(self, request: web.Request) -> web.Response | None:
        headers = {name.lower().encode(): value.encode() for name, value in request.headers.items()}
        refusal = self.closed.refused_move(headers)
        return None if refusal is None else _respond(refusal)

    async def _is_paused(self, _request: web.Request) -> web.Response:
        return web.json_response({"is_paused": self.paused})

    async def _weight_route(self, request: web.Request) -> web.Response:
        app = SimpleNamespace(state=SimpleNamespace(engine_client=self.rank))
        return _respond(await self._weights.own(app, request.method, request.path, await request.read()))


def _respond(answer: Answer) -> web.Response:
    return web.json_response(answer.content, status=answer.status)
