"""The fence's routes about weights, with ranks that answer as a test says: what is obeyed and believed."""

from __future__ import annotations

import asyncio
import base64
import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from connectors.vllm_plugin.fence import Fence, Scope, Send
from connectors.vllm_plugin.weight_metrics import PARTS
from connectors.vllm_plugin.weights.settings import BACKEND, WORKER_EXTENSION
from connectors.vllm_plugin.weights.verdict import LoadResult, RankReport
from tests.unit.connectors.vllm_plugin.asgi import BEARER, TOKEN, Exchange, Inner, call

GENERATING = {"x-headrace-instance": "life-1", "x-headrace-epoch": "5", "x-headrace-salted": "1"}
SOURCE = {"transport": "path", "version": "v1", "path": "/weights/v1"}
NUMBERS: dict[str, Any] = {**dict.fromkeys(PARTS, 0.25), "bytes": 1000, "peak_extra_bytes": 10}
Answering = Callable[[int, dict[str, Any]], Any]
"""Rank and command -> its answer."""


class Engine:
    """Stands for vLLM's engine client and for the ranks behind it."""

    def __init__(self, ranks: int = 2, extension: str = WORKER_EXTENSION) -> None:
        parallel = SimpleNamespace(world_size=ranks, worker_extension_cls=extension)
        self.vllm_config = SimpleNamespace(
            parallel_config=parallel, weight_transfer_config=SimpleNamespace(backend=BACKEND)
        )
        self.commands: list[dict[str, Any]] = []
        self.moves: list[int | None] = []
        """The epochs that its ranks were moved to."""
        self.stays: tuple[int | None, int] | None = None
        """(epoch, rank): a rank that does not follow there."""
        self.version = "default"
        self.cache_fails = False
        self.resets: list[str] = []
        self.answering: Answering = self.obedient
        self.asked = asyncio.Event()
        self.hold = asyncio.Event()
        self.hold.set()

    def obedient(self, rank: int, command: dict[str, Any]) -> Any:
        version = command["source"].get("version")
        last = LoadResult(ok=True, version=version or "", numbers=NUMBERS)
        return self.report(rank, command, version=version, last_load=last)

    def report(self, rank: int, command: dict[str, Any], **more: Any) -> dict[str, Any]:
        ranks = self.vllm_config.parallel_config.world_size
        return RankReport(**{"call": command["call"], "rank": rank, "ranks": ranks, "ok": True, **more}).to_wire()

    async def collective_rpc(self, method: str, timeout: float, args: tuple[Any, ...]) -> list[Any]:
        if method == "headrace_pool":
            return await self.move(*args)
        (command,) = args
        self.commands.append(command)
        self.asked.set()
        await self.hold.wait()
        return [self.answering(rank, command) for rank in range(self.vllm_config.parallel_config.world_size)]

    async def move(self, call: str, epoch: int | None) -> list[Any]:
        self.moves.append(epoch)
        self.asked.set()
        await self.hold.wait()
        stays = [(epoch, rank) == self.stays for rank in range(self.vllm_config.parallel_config.world_size)]
        return [
            self.report(rank, {"call": call}, ok=not stay, error="no pool" if stay else "")
            for rank, stay in enumerate(stays)
        ]

    async def reset_mm_cache(self) -> None:
        if self.cache_fails:
            raise RuntimeError("no answer")
        self.resets.append("mm")

    async def reset_encoder_cache(self) -> None:
        self.resets.append("encoder")

    async def update_weight_version(self, version: str) -> None:
        self.version = version


class Fenced:
    """A fence with an open epoch 5 in front of an app with such an engine."""

    def __init__(self, engine: Engine, inner: Inner | None = None) -> None:
        self.engine = engine
        self.inner = inner or Inner()
        self.fence = Fence(self.inner)
        self.app = SimpleNamespace(state=SimpleNamespace(engine_client=engine))

    async def call(self, method: str, path: str, body: Any = None, headers: dict[str, str] = BEARER) -> Exchange:
        return await call(self.fence, method, path, headers, (json.dumps(body or {}).encode(),), app=self.app)

    async def command(self, name: str, step: int, **fields: Any) -> tuple[int, dict[str, Any]]:
        body = {"instance": "life-1", "update": 1, "attempt": 0, "step": step, **fields}
        exchange = await self.call("POST", f"/weights/{name}", body)
        return exchange.status, json.loads(exchange.body)

    async def load(self, step: int, **fields: Any) -> tuple[int, dict[str, Any]]:
        return await self.command("load", step, **{"source": SOURCE, **fields})

    async def confirm(self, step: int, epoch: int | None = 5) -> int:
        order = {"update": 1, "attempt": 0, "step": step}
        return (await self.call("POST", "/fence", {"instance": "life-1", "epoch": epoch, **order})).status

    async def generates(self) -> bool:
        return (await self.call("POST", "/v1/completions", headers=BEARER | GENERATING)).status == 200


@pytest.fixture(autouse=True)
def environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "token").write_text(TOKEN)
    monkeypatch.setenv("HEADRACE_TOKEN_FILE", str(tmp_path / "token"))
    monkeypatch.setenv("HEADRACE_INSTANCE", "life-1")


def failed(engine: Engine, **more: Any) -> Answering:
    def answering(rank: int, command: dict[str, Any]) -> Any:
        if command["name"] != "load":
            return engine.obedient(rank, command)
        return engine.report(rank, command, ok=False, error="rank 1: no such tensor: a.b", **more)

    return answering


def test_a_load_moves_the_version_empties_caches_and_closes_the_epoch() -> None:
    async def scenario() -> None:
        fenced = Fenced(Engine())
        await fenced.confirm(1)
        status, answer = await fenced.load(2, mode="gpu_fetch", check_finite=True, timeout_s=5, limit_s=50)
        assert (status, answer["ok"], answer["version"], len(answer["ranks"])) == (200, True, "v1", 2)
        (command,) = fenced.engine.commands
        assert (command["source"], command["mode"], command["timeout_s"]) == (SOURCE, "gpu_fetch", 5)
        assert (fenced.engine.version, fenced.engine.resets) == ("v1", ["mm", "encoder"])
        assert not await fenced.generates()
        assert await fenced.confirm(3) == 200
        assert await fenced.generates()

    asyncio.run(scenario())


def test_a_load_that_wrote_nothing_leaves_everything_as_it_was() -> None:
    async def scenario() -> None:
        fenced = Fenced(Engine())
        await fenced.confirm(1)
        fenced.engine.answering = failed(fenced.engine)
        status, answer = await fenced.load(2)
        assert (status, answer["ok"], answer["unfit"]) == (500, False, "")
        assert "a.b" in answer["error"]
        assert (fenced.engine.version, fenced.engine.resets) == ("default", [])
        assert await fenced.generates()
        assert (await fenced.call("GET", "/health")).status == 200

    asyncio.run(scenario())


def test_a_torn_engine_is_fenced_until_a_load_succeeds() -> None:
    async def scenario() -> None:
        fenced = Fenced(Engine())
        await fenced.confirm(1)
        fenced.engine.answering = failed(fenced.engine, torn="half of it came")
        assert (await fenced.load(2))[0] == 500
        assert not await fenced.generates()
        health = await fenced.call("GET", "/health")
        assert health.status == 503
        assert b"half of it came" in health.body
        assert await fenced.confirm(3) == 409
        fenced.engine.answering = fenced.engine.obedient
        assert (await fenced.load(4))[0] == 200
        assert (await fenced.call("GET", "/health")).status == 200
        assert await fenced.confirm(5) == 200
        assert await fenced.generates()

    asyncio.run(scenario())


def test_caches_that_were_not_emptied_keep_the_engine_closed_until_a_load_has_emptied_them() -> None:
    async def scenario() -> None:
        fenced = Fenced(Engine())
        fenced.engine.cache_fails = True
        status, answer = await fenced.load(1)
        assert (status, answer["ok"]) == (500, False)
        assert "caches of the old weights" in answer["error"]
        # What the ranks say of their weights doesn't mend it.
        state = json.loads((await fenced.call("GET", "/weights/state")).body)
        assert "caches of the old weights" in state["unfit"]
        assert await fenced.confirm(2) == 409
        assert (await fenced.call("POST", "/start_weight_update")).status == 200
        assert (await fenced.call("POST", "/finish_weight_update")).status == 500
        fenced.engine.cache_fails = False
        assert (await fenced.load(3))[0] == 200
        assert await fenced.confirm(4) == 200

    asyncio.run(scenario())


def test_an_epoch_that_is_withdrawn_during_a_load_stays_so_when_the_load_fails() -> None:
    async def scenario() -> None:
        fenced = Fenced(Engine())
        await fenced.confirm(1)
        fenced.engine.answering = failed(fenced.engine)
        fenced.engine.hold.clear()
        fenced.engine.asked.clear()
        running = asyncio.create_task(fenced.load(2))
        await fenced.engine.asked.wait()
        withdrawal = asyncio.create_task(fenced.confirm(3, None))
        await asyncio.sleep(0)
        fenced.engine.hold.set()
        assert (await running)[0] == 500
        assert await withdrawal == 200
        assert not await fenced.generates()

    asyncio.run(scenario())


def shifted(rank: int, command: dict[str, Any]) -> Any:
    return None if rank else RankReport(call=command["call"], rank=0, ranks=2, ok=True).to_wire()


def test_shifted_answers_are_believed_never_again() -> None:
    async def scenario() -> None:
        fenced = Fenced(Engine())
        await fenced.confirm(1)
        fenced.engine.answering = shifted
        assert (await fenced.load(2))[0] == 500
        fenced.engine.answering = fenced.engine.obedient
        assert (await fenced.load(3))[0] == 503
        assert await fenced.confirm(4) == 409
        assert (await fenced.call("GET", "/health")).status == 503
        assert (fenced.engine.version, await fenced.generates()) == ("default", False)

    asyncio.run(scenario())


class Raising(Inner):
    """As vLLM's routes do: the answer is made outside all middleware."""

    async def answer(self, scope: Scope, send: Send) -> None:
        if scope["path"] == "/collective_rpc":
            raise RuntimeError("broken")
        await super().answer(scope, send)


@pytest.mark.parametrize(("ranks", "fit"), [(1, True), (2, False)])
def test_a_call_of_vllms_own_that_raised_in_one_of_several_ranks_ends_this_life(ranks: int, fit: bool) -> None:
    async def scenario() -> None:
        fenced = Fenced(Engine(ranks), Raising())
        await fenced.confirm(1)
        with pytest.raises(RuntimeError, match="broken"):
            await fenced.call("POST", "/collective_rpc", {"method": "broken"})
        assert ((await fenced.call("GET", "/health")).status == 200) == fit
        assert ((await fenced.load(2))[0] == 200) == fit

    asyncio.run(scenario())


def test_orders() -> None:
    async def scenario() -> None:
        fenced = Fenced(Engine())
        assert (await fenced.load(4))[0] == 200
        assert (await fenced.load(4))[0] == 200
        assert len(fenced.engine.commands) == 1
        assert (await fenced.load(4, mode="cpu_prefetch"))[0] == 409
        assert (await fenced.load(3))[0] == 409
        assert await fenced.confirm(3) == 409
        assert (await fenced.command("load", 5, source=SOURCE, instance="life-0"))[0] == 409
        assert (await fenced.command("reset", 5))[0] == 200
        assert (await fenced.command("serve", 6))[0] == 200
        assert [command["name"] for command in fenced.engine.commands] == ["load", "reset", "serve"]

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"source": []}, "source"),
        ({"source": {"transport": "path"}}, "source.version"),
        ({"mode": "fast"}, "mode"),
        ({"check_finite": 1}, "check_finite"),
        ({"timeout_s": 0}, "timeout_s"),
        ({"limit_s": "9"}, "limit_s"),
        ({"limit_s": float("inf")}, "limit_s"),
        ({"step": -1}, "step"),
        ({"stranger": 1}, "stranger"),
    ],
)
def test_a_command_that_is_none_names_the_field(fields: dict[str, Any], param: str) -> None:
    async def scenario() -> None:
        fenced = Fenced(Engine())
        step = fields.pop("step", 1)
        status, answer = await fenced.load(step, **fields)
        assert (status, answer["error"]["param"]) == (400, param)
        assert fenced.engine.commands == []

    asyncio.run(scenario())


def test_one_command_at_a_time_and_the_state_at_any_time() -> None:
    async def scenario() -> None:
        fenced = Fenced(Engine())
        fenced.engine.hold.clear()
        running = asyncio.create_task(fenced.load(1))
        await fenced.engine.asked.wait()
        assert (await fenced.load(2))[0] == 409
        assert (await fenced.call("POST", "/update_weights")).status == 409
        state = json.loads((await fenced.call("GET", "/weights/state")).body)
        assert state["running"] == "load"
        assert await fenced.confirm(2) == 409
        assert not await fenced.generates()
        fenced.engine.hold.set()
        assert (await running)[0] == 200
        state = json.loads((await fenced.call("GET", "/weights/state")).body)
        assert (state["running"], state["ok"]) == ("", True)

    asyncio.run(scenario())


def test_a_running_request_must_be_paused_first() -> None:
    async def scenario() -> None:
        fenced = Fenced(Engine())
        await fenced.confirm(1)
        fenced.fence._state.accept("request-1")
        assert (await fenced.load(2))[0] == 409
        assert (await fenced.call("POST", "/start_weight_update")).status == 409
        assert (await fenced.call("POST", "/update_weights")).status == 409
        await fenced.call("POST", "/pause")
        assert (await fenced.load(3))[0] == 200

    asyncio.run(scenario())


def test_without_the_worker_extension_it_says_so() -> None:
    async def scenario() -> None:
        status, answer = await Fenced(Engine(extension="")).load(1)
        assert status == 501
        assert WORKER_EXTENSION in answer["error"]["message"]

    asyncio.run(scenario())


def test_adapters_are_not_loaded() -> None:
    async def scenario() -> None:
        fenced = Fenced(Engine())
        assert (await fenced.call("POST", "/v1/load_lora_adapter", {"lora_name": "a"})).status == 403
        assert fenced.inner.scopes == []

    asyncio.run(scenario())


def test_vllms_own_routes_end_to_end() -> None:
    async def scenario() -> None:
        fenced = Fenced(Engine())
        for step, path in enumerate(("/start_weight_update", "/update_weights", "/finish_weight_update"), start=1):
            # Also one that is confirmed in the middle does not outlive the load.
            assert step == 3 or await fenced.confirm(step) == 200
            assert (await fenced.call("POST", path)).status == 200
        assert [command["name"] for command in fenced.engine.commands] == ["reset", "state", "state"]
        assert fenced.engine.resets == ["mm", "encoder"]
        assert not await fenced.generates()

    asyncio.run(scenario())


def test_a_failed_update_over_vllms_own_routes_never_finishes() -> None:
    async def scenario() -> None:
        fenced = Fenced(Engine())

        def answering(rank: int, command: dict[str, Any]) -> Any:
            last = LoadResult(ok=rank == 0, version="v1", error="no such file")
            return fenced.engine.report(rank, command, last_load=last)

        fenced.engine.answering = answering
        assert (await fenced.call("POST", "/start_weight_update")).status == 200
        update = await fenced.call("POST", "/update_weights")
        assert update.status == 500
        assert b"no such file" in update.body
        assert (await fenced.call("POST", "/finish_weight_update")).status == 500
        assert [scope["path"] for scope in fenced.inner.scopes] == ["/start_weight_update", "/update_weights"]

    asyncio.run(scenario())


def test_the_token_as_a_password() -> None:
    async def scenario() -> None:
        fenced = Fenced(Engine())
        for password, status in ((TOKEN, 200), ("wrong", 401), ("", 401)):
            credentials = base64.b64encode(f"headrace:{password}".encode()).decode()
            headers = {"authorization": f"Basic {credentials}"}
            assert (await fenced.call("POST", "/start_weight_update", headers=headers)).status == status
        assert (await fenced.call("GET", "/metrics", headers={"authorization": "Basic ???"})).status == 401

    asyncio.run(scenario())
