"""Updates of a whole fleet over HTTP: the real coordinator and clients, the real router, stub engines under load.

Every rule that an engine obeys here is the real fence's.
"""

from __future__ import annotations

import asyncio
import itertools
import socket
import threading
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from connectors.types import Role
from connectors.weights.nixl.desk import Desk
from connectors.weights.nixl.leases import Readers
from connectors.weights.nixl.messages import QUESTIONS, Layout, receive, send
from orchestrator.plan.kinds import kinds_of
from orchestrator.plan.types import EnginePlan, JobPlan
from orchestrator.supervision import Supervision
from orchestrator.weight_service import PushOptions, WeightService
from orchestrator.weights.journal import PushRecord
from orchestrator.weights.receivers import Receivers
from orchestrator.weights.words import Position
from router.main import running
from router.settings import EngineEndpoint
from tests.fakes.fake_launch import FakeFleet
from tests.fakes.stub_engine import HANDOFF
from tests.fakes.updatable_engine import UpdatableEngine
from tests.integration.router.harness import TOKEN, Bench, make_settings, until

LIMITS = {"grace": 0.05, "again": 0.05, "tries": 2, "drain": 5, "in_flight": 5}
ROLES: tuple[Role, ...] = ("prefill", "decode")


@dataclass
class Fleet:
    """Two pairs, their router, and the control plane's parts."""

    engines: dict[str, UpdatableEngine]
    bench: Bench
    weights: WeightService
    supervision: Supervision

    async def push(self, version: str, **options: Any) -> PushRecord:
        source = {"transport": "path", "path": f"/checkpoints/{version}"}
        number = self.weights.push("demo", version, source, PushOptions(**options)).number
        record = await asyncio.to_thread(self.weights.see_through, "demo", number)
        position = self.weights.position("demo")
        assert position is not None
        assert position.course is None
        return record

    def served(self) -> set[tuple[str | None, int | None, bool]]:
        """Version, epoch and whether paused, of all engines."""
        return {(each.rank.report.version, each.closed.epoch, each.paused) for each in self.engines.values()}


@asynccontextmanager
async def serving(home: Path) -> AsyncIterator[Fleet]:
    fake = FakeFleet(home)
    (home / "token").write_text(TOKEN)
    async with AsyncExitStack() as stack:
        engines: dict[str, UpdatableEngine] = {}
        roles = {f"{role}-{number}": role for role in ROLES for number in range(2)}
        for name, role in roles.items():
            stub = UpdatableEngine(name=name, token=TOKEN, handoff=HANDOFF if role == "prefill" else None)
            stub.latency_s, stub.token_s = 0.01, 0.002
            engines[name] = await stack.enter_async_context(stub.running())
        endpoints = [EngineEndpoint(name=name, role=role, url=engines[name].url) for name, role in roles.items()]
        router = await stack.enter_async_context(running(make_settings(endpoints), TOKEN))
        client = await stack.enter_async_context(aiohttp.ClientSession())
        stubs: dict[str, list[Any]] = {role: [engines[f"{role}-{number}"] for number in range(2)] for role in ROLES}
        bench = Bench(router=router, client=client, colocated=[], **stubs)
        plan = _pointed_at(
            fake.plan(weights={"limits": LIMITS}, roles={"prefill": {"replicas": 2}, "decode": {"replicas": 2}}),
            engines,
            bench,
            home,
        )
        fake.record(plan)
        job = await asyncio.to_thread(fake.bring_up)
        supervision = replace(fake.supervision(), carry_out=lambda plan: Receivers(plan=plan).carry_out)
        supervision = replace(
            supervision, not_ready=lambda _router: "" if all(map(bench.is_usable, engines)) else "not all are usable"
        )
        weights = WeightService(store=fake.store, updates=fake.updates, supervision=supervision)
        await asyncio.to_thread(supervision.open, job)
        yield Fleet(engines=engines, bench=bench, weights=weights, supervision=supervision)


def _pointed_at(plan: JobPlan, engines: dict[str, UpdatableEngine], bench: Bench, home: Path) -> JobPlan:
    token = str(home / "token")

    def at_its_stub(engine: EnginePlan) -> EnginePlan:
        return replace(engine, url=engines[engine.name].url, token_file=token)

    router = replace(plan.router, url=bench.url, internal_url=bench.admin_url, token_file=token)
    # The model pool holds no keys.
    units = tuple(unit for unit in plan.units if kinds_of(plan)[unit.name] not in ("master", "storage"))
    return replace(plan, engines=tuple(map(at_its_stub, plan.engines)), router=router, pool=None, units=units)


@asynccontextmanager
async def traffic(fleet: Fleet, clients: int = 8) -> AsyncIterator[Counter[tuple[int, Any, bool]]]:
    """Conversations until the end of the block: (status, epoch, single version) of their replies."""
    seen: Counter[tuple[int, Any, bool]] = Counter()
    stop = asyncio.Event()

    async def converse(name: str) -> None:
        for turn in itertools.count():
            if stop.is_set():
                return
            answer = await fleet.bench.post(session=f"{name}-{turn // 3}", return_headrace=True)
            label = answer.json.get("headrace", {})
            seen[answer.status, *label.get("epochs", [None]), label.get("single_version", False)] += 1

    async with asyncio.TaskGroup() as group:
        for number in range(clients):
            group.create_task(converse(f"c{number}"))
        await until(lambda: seen.total() > clients)
        yield seen
        count = seen.total()
        await until(lambda: seen.total() > count + 2 * clients)
        stop.set()


def unharmed(fleet: Fleet) -> bool:
    """Nothing came to a closed fence or while paused, nothing was closed in a pause, every pause left the caches."""
    engines = fleet.engines.values()
    assert [each.refused for each in engines] == [[]] * len(engines)
    assert sum(each.closed_in_pause for each in engines) == 0
    assert all(pause == {"mode": "keep", "clear_cache": "false"} for each in engines for pause in each.pauses)
    return True


@pytest.mark.parametrize("in_flight", ["readmit", "wait", "keep"])
def test_a_barrier_under_load(tmp_path: Path, in_flight: str) -> None:
    async def case() -> None:
        async with serving(tmp_path) as fleet:
            async with traffic(fleet) as seen:
                record = await fleet.push("step-1", in_flight=in_flight)
            assert (record.outcome, record.why) == ("committed", "")
            assert fleet.served() == {("step-1", 2, False)}
            assert {(status, epoch) for status, epoch, *_ in seen} == {(200, 1), (200, 2)}
            assert in_flight == "keep" or all(single for *_, single in seen)
            assert in_flight == "keep" or unharmed(fleet)

    asyncio.run(case())


def test_rolling_under_load(tmp_path: Path) -> None:
    async def case() -> None:
        async with serving(tmp_path) as fleet:
            async with traffic(fleet) as seen:
                record = await fleet.push("step-1", strategy="rolling", load_mode="cpu_prefetch")
            assert (record.outcome, record.why) == ("committed", "")
            assert fleet.served() == {("step-1", 2, False)}
            assert set(seen) == {(200, 1, True), (200, 2, True)}
            assert unharmed(fleet)
            modes = {command["mode"] for each in fleet.engines.values() for command in each.rank.loads}
            assert modes == {"cpu_prefetch"}

    asyncio.run(case())


def test_a28_a_load_that_fails_on_one_engine_leaves_the_fleet_on_its_version(tmp_path: Path) -> None:
    async def case() -> None:
        async with serving(tmp_path) as fleet:
            fleet.engines["decode-1"].rank.fails = "rank 0: no such tensor: a.b"
            async with traffic(fleet) as seen:
                record = await fleet.push("step-1")
            assert (record.outcome, "decode-1: rank 0: no such tensor" in record.why) == ("rolled_back", True)
            assert {status for status, *_ in seen} == {200}
            assert all(single for *_, single in seen)
            fleet.engines["decode-1"].rank.fails = ""
            assert (await fleet.push("step-1")).outcome == "committed"
            assert {version for version, *_ in fleet.served()} == {"step-1"}

    asyncio.run(case())


@pytest.mark.parametrize("gone", [(), ("path",)])
def test_a41_an_engine_that_came_back_joins_before_it_is_used(tmp_path: Path, gone: tuple[str, ...]) -> None:
    """`gone`: what it can no longer load from; then a peer serves it."""

    async def case() -> None:
        async with serving(tmp_path) as fleet:
            await fleet.push("step-1")
            back = fleet.engines["decode-0"]
            await back.stop()
            back.fence, back.rank = None, type(back.rank)()
            back.rank.gone = set(gone)
            back.__post_init__()
            back.closed.instance = "decode-0.b"
            await back.start(back.port)
            async with traffic(fleet) as seen:
                # As its supervisor tells of a life that is up; whoever begins anew reads everybody back.
                def is_over(position: Position) -> bool:
                    return position.course is None and fleet.served() == {("step-1", 2, False)}

                await asyncio.to_thread(fleet.supervision.keep, "demo", is_over)
            assert {(status, epoch) for status, epoch, *_ in seen} == {(200, 2)}
            assert fleet.bench.is_usable("decode-0")
            transports = [command["source"]["transport"] for command in back.rank.loads]
            assert transports == (["path", "nixl"] if gone else ["path"])

    asyncio.run(case())


def answer_one_question(listener: socket.socket, desk: Desk) -> None:
    connection, _ = listener.accept()
    with connection:
        send(connection, desk.answer(receive(connection, QUESTIONS)))


def test_each_engine_gets_its_own_part_of_the_trainer_and_the_trainer_hears_when_all_are_done(tmp_path: Path) -> None:
    async def case() -> None:
        desk = Desk(lease_s=60)
        desk.open("step-1", Layout("layout", {}, ()))
        with socket.create_server(("127.0.0.1", 0)) as listener:
            threading.Thread(target=answer_one_question, args=(listener, desk), daemon=True).start()
            host, port = listener.getsockname()
            source = {"transport": "nixl", "version": "step-1", "host": host, "port": port}
            async with serving(tmp_path) as fleet:
                options = PushOptions(load_mode="cpu_prefetch")
                number = fleet.weights.push("demo", None, source, options).number
                # Without a number of readers only that they are released ends it.
                done = asyncio.to_thread(desk.finish, "step-1", readers=None, timeout_s=3600)
                record, readers = await asyncio.gather(
                    asyncio.to_thread(fleet.weights.see_through, "demo", number), done
                )
        assert (record.outcome, readers) == ("committed", Readers(frozenset(), frozenset()))
        numbers = []
        for engine in fleet.engines.values():
            (prefetch,), (load,) = engine.rank.prefetches, engine.rank.loads
            assert prefetch["source"] == load["source"], "what was prefetched is what is loaded"
            assert source.items() <= load["source"].items()
            numbers.append((load["source"]["first_reader"], load["source"]["readers"]))
        assert numbers == [(0, 4), (1, 4), (2, 4), (3, 4)]

    asyncio.run(case())
