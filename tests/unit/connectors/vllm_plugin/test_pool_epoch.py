"""In which epoch the ranks' pool is while the fence obeys: all of them or none, and none while weights change."""

from __future__ import annotations

import asyncio
import json

import pytest

from tests.unit.connectors.vllm_plugin.test_weight_routes import Engine, Fenced, environment, failed

__all__ = ["environment"]


def test_an_epoch_is_open_once_all_ranks_are_in_it() -> None:
    async def scenario() -> None:
        fenced = Fenced(Engine())
        fenced.engine.hold.clear()
        confirming = asyncio.create_task(fenced.confirm(1))
        await fenced.engine.asked.wait()
        assert not await fenced.generates()
        assert (await fenced.load(2))[0] == 409
        assert await fenced.confirm(3, epoch=6) == 409
        fenced.engine.hold.set()
        assert await confirming == 200
        assert await fenced.generates()
        assert fenced.engine.moves == [5]

    asyncio.run(scenario())


def test_a_rank_that_stays_behind_keeps_the_fence_closed() -> None:
    async def scenario() -> None:
        fenced = Fenced(Engine())
        assert await fenced.confirm(1) == 200
        fenced.engine.stays = (6, 1)
        exchange = await fenced.call(
            "POST", "/fence", {"instance": "life-1", "epoch": 6, "update": 2, "attempt": 0, "step": 0}
        )
        assert exchange.status == 500
        assert "no pool" in json.loads(exchange.body)["error"]["message"]
        assert json.loads((await fenced.call("GET", "/fence")).body)["epoch"] is None
        assert fenced.engine.moves == [5, 6, None], "the ranks that did move leave again"
        fenced.engine.stays = None
        again = {"instance": "life-1", "epoch": 6, "update": 2, "attempt": 1, "step": 0}
        assert (await fenced.call("POST", "/fence", again)).status == 200

    asyncio.run(scenario())


def test_a_withdrawal_overtakes_a_confirmation() -> None:
    async def scenario() -> None:
        fenced = Fenced(Engine())
        fenced.engine.hold.clear()
        confirming = asyncio.create_task(fenced.confirm(1))
        await fenced.engine.asked.wait()
        withdrawing = asyncio.create_task(fenced.confirm(2, epoch=None))
        await asyncio.sleep(0)
        fenced.engine.hold.set()
        await asyncio.gather(confirming, withdrawing)
        assert fenced.engine.moves == [5, None]
        assert not await fenced.generates()

    asyncio.run(scenario())


def test_the_ranks_are_not_asked_twice_for_the_same() -> None:
    async def scenario() -> None:
        fenced = Fenced(Engine())
        assert await fenced.confirm(1, epoch=None) == 200
        for step in (2, 3, 3):
            assert await fenced.confirm(step) == 200
        assert fenced.engine.moves == [5]

    asyncio.run(scenario())


def test_a_load_leaves_the_epoch_before_it_begins() -> None:
    async def scenario() -> None:
        fenced = Fenced(Engine())
        await fenced.confirm(1)
        assert (await fenced.load(2))[0] == 200
        assert fenced.engine.moves == [5, None]
        assert (await fenced.call("POST", "/start_weight_update")).status == 200
        assert fenced.engine.moves == [5, None]

    asyncio.run(scenario())


def test_a_load_that_changed_nothing_returns_to_the_epoch() -> None:
    async def scenario() -> None:
        fenced = Fenced(Engine())
        await fenced.confirm(1)
        fenced.engine.answering = failed(fenced.engine)
        assert (await fenced.load(2))[0] == 500
        assert fenced.engine.moves == [5, None, 5]
        assert await fenced.generates()

    asyncio.run(scenario())


def test_a_torn_load_does_not() -> None:
    async def scenario() -> None:
        fenced = Fenced(Engine())
        await fenced.confirm(1)
        fenced.engine.answering = failed(fenced.engine, torn="half")
        assert (await fenced.load(2))[0] == 500
        assert fenced.engine.moves == [5, None]

    asyncio.run(scenario())


@pytest.mark.parametrize("path", ["/weights/load", "/start_weight_update"])
def test_nothing_is_loaded_by_ranks_that_did_not_leave_their_epoch(path: str) -> None:
    async def scenario() -> None:
        fenced = Fenced(Engine())
        await fenced.confirm(1)
        fenced.engine.stays = (None, 0)
        order = {"update": 1, "attempt": 0, "step": 2}
        source = {"transport": "path", "version": "v1", "path": "/weights/v1"}
        body = {"instance": "life-1", "source": source, **order} if path == "/weights/load" else {}
        assert (await fenced.call("POST", path, body)).status == 500
        assert fenced.engine.commands == []
        assert fenced.inner.scopes == []

    asyncio.run(scenario())


def test_an_engine_whose_ranks_know_no_pool_of_ours_is_confirmed_without_them() -> None:
    async def scenario() -> None:
        fenced = Fenced(Engine(extension=""))
        assert await fenced.confirm(1) == 200
        assert fenced.engine.moves == []

    asyncio.run(scenario())
