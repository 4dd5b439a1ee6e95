"""A router whose job is to stop: open requests finish, new ones are not sent to engines. The router is the real one."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from orchestrator.observe import router as observed
from orchestrator.observe.router import let_requests_end
from orchestrator.plan.types import RouterPlan
from tests.integration.router.harness import TOKEN, Bench, bench, turns, until


def plan_of(made: Bench, folder: Path) -> RouterPlan:
    token = folder / "token"
    token.write_text(TOKEN)
    return RouterPlan(url=made.url, internal_url=made.admin_url, config_file="", token_file=str(token))


def test_open_requests_finish_and_new_ones_wait(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(observed, "DRAIN_LOOK_S", 0.1)

    async def scenario() -> None:
        async with bench(max_wait_s=1.0) as made:
            engine = made.decode[0]
            engine.answers.clear()
            open_one = made.start()
            await until(lambda: engine.open == 1)
            drain = asyncio.create_task(asyncio.to_thread(let_requests_end, plan_of(made, tmp_path), lambda: True))
            await until(lambda: made.dispatcher.gate.state == "holding")
            late_one = made.start()
            await turns()
            assert not drain.done()
            engine.answers.set()
            assert (await open_one).status == 200
            await drain
            assert (await late_one).status == 503
            assert engine.arrived == 1

    asyncio.run(scenario())


def test_a_drain_that_is_no_longer_wanted_or_cannot_be_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(observed, "DRAIN_LOOK_S", 0.1)

    async def scenario() -> None:
        async with bench() as made:
            engine, plan = made.decode[0], plan_of(made, tmp_path)
            engine.answers.clear()
            open_one = made.start()
            await until(lambda: engine.open == 1)
            wanted = iter((True, True, True))
            await asyncio.to_thread(let_requests_end, plan, lambda: next(wanted, False))
            assert engine.open == 1
            engine.answers.set()
            await open_one
        await asyncio.to_thread(let_requests_end, plan, lambda: True)

    asyncio.run(scenario())
