"""A fleet under load lives through weight updates: right answers, nothing sent to the wrong epoch or while paused."""

from __future__ import annotations

import asyncio
import itertools
from collections import Counter
from typing import Any

import pytest

from tests.integration.router.harness import CHAT, COMPLETIONS, Bench, bench

PATHS = itertools.cycle([COMPLETIONS, CHAT])


async def _client(made: Bench, name: str, stream: bool, stop: asyncio.Event, seen: Counter[int]) -> None:
    """One conversation after the other, until told to stop."""
    for turn in itertools.count():
        if stop.is_set():
            return
        answer = await made.post(next(PATHS), session=f"{name}-{turn // 3}", stream=stream, return_headrace=True)
        seen[answer.status] += 1
        if answer.status == 200:
            events = answer.events if stream else [answer.json]
            if "error" in events[-1]:
                seen[events[-1]["error"]["code"]] += 1
                continue
            label = events[-1]["headrace"]
            assert label["single_version"] is True
            assert answer.headers["x-headrace-epoch"] == str(label["epochs"][0])


async def _update(made: Bench, epoch: int, mode: str) -> None:
    """A barrier, as the control plane does it."""
    order = {"update": epoch, "attempt": 1}
    commands: list[tuple[str, dict[str, Any]]] = [
        ("/gate", {"gate": "holding", "step": 1}),
        ("/in_flight", {"mode": mode, "step": 2}),
        ("/gate", {"gate": "frozen", "step": 3}),
    ]
    for path, body in commands:
        answer = await made.command(path, {**body, **order})
        assert answer.status == 200, answer.raw
    assert answer.json["running"] == 0
    for stub in made.engines:
        assert stub.fence is not None
        stub.fence.pause_received()
        stub.fence.epoch = epoch
    await asyncio.sleep(0.05)
    for stub in made.engines:
        assert stub.fence is not None
        stub.fence.resumed(stub.fence.pauses)
    for path, body in (("/epochs", {"epoch": epoch, "version": f"v{epoch}"}), ("/gate", {"gate": "open"})):
        assert (await made.command(path, {**body, **order, "step": 4})).status == 200


@pytest.mark.parametrize("mode", ["wait", "readmit", "abort"])
def test_a_fleet_under_load_lives_through_updates(mode: str) -> None:
    async def case() -> None:
        async with bench(fenced=True, prefill=2, decode=3, max_legs_per_replica=6, max_requests=24) as made:
            for stub in made.engines:
                stub.latency_s = 0.01
                stub.token_s = 0.002
            stop, seen = asyncio.Event(), Counter[int]()
            async with asyncio.TaskGroup() as clients:
                for number in range(30):
                    # A stream that is readmitted goes on in another way: it has to be continued.
                    stream = number % 3 == 0 and mode != "readmit"
                    clients.create_task(_client(made, f"s{number}", stream, stop, seen))
                for epoch in range(2, 7):
                    await asyncio.sleep(0.1)
                    await _update(made, epoch, mode)
                await asyncio.sleep(0.1)
                stop.set()
            assert seen[200] > 30
            assert set(seen) <= ({200, 503} if mode == "abort" else {200})
            assert [stub.refused for stub in made.engines] == [[]] * 5
            assert sum(stub.closed_in_pause for stub in made.engines) == 0
            _check_pairs(made)
            state = await made.state()
            assert (state["admitted"], state["waiting"]) == (0, 0)
            assert await made.metric("legs_in_flight") == await made.metric("tokens_in_flight") == 0

    asyncio.run(case())


def _check_pairs(made: Bench) -> None:
    """Each handoff was used once, in its own epoch, under its own salt."""
    made_by = {each.request_id: each for stub in made.prefill for each in stub.requests}
    used = Counter(each.handoff["remote_request_id"] for stub in made.decode for each in stub.requests)
    assert max(used.values()) == 1
    for stub in made.decode:
        for each in stub.requests:
            origin = made_by[each.handoff["remote_request_id"]]
            assert origin.headers["x-headrace-epoch"] == each.headers["x-headrace-epoch"]
            assert origin.body["cache_salt"] == each.body["cache_salt"]
            assert origin.request_id == each.request_id
