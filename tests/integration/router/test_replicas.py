"""Replicas that the control plane adds, drains and removes while the router serves."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from router.settings import EngineRole
from tests.fakes.stub_engine import StubEngine
from tests.integration.router.harness import Bench, bench, new_stub, turns, until


async def _add(made: Bench, stub: StubEngine, role: EngineRole, **fields: Any) -> int:
    body = {"name": stub.name, "role": role, "url": stub.url, **fields}
    return (await made.command("/replicas", body)).status


def test_a_replica_that_is_added_serves_once_its_epoch_is_known() -> None:
    async def case() -> None:
        new = new_stub("decode", 1, fenced=True)
        async with bench(fenced=True) as made, new.running():
            assert await _add(made, new, "decode", instance="decode-1.a") == 200
            await until(lambda: made.dispatcher.fleet.members["decode-1"].alive)
            assert {(await made.post()).decode for _ in range(4)} == {"decode-0"}
            await made.commit(1, "v1", new)
            assert {(await made.post()).decode for _ in range(4)} == {"decode-0", "decode-1"}
            assert new.refused == []

    asyncio.run(case())


def test_a_replica_can_be_added_with_its_epoch() -> None:
    async def case() -> None:
        new = new_stub("decode", 1)
        async with bench() as made, new.running():
            assert await _add(made, new, "decode", epoch=2) == 409
            assert await _add(made, new, "decode", epoch=1) == 200
            await until(lambda: made.is_usable("decode-1"))
            assert {(await made.post()).decode for _ in range(4)} == {"decode-0", "decode-1"}

    asyncio.run(case())


def test_requests_that_found_no_room_go_to_a_replica_that_is_added() -> None:
    async def case() -> None:
        new = new_stub("decode", 1)
        async with bench(max_legs_per_replica=2) as made, new.running():
            made.decode[0].answers.clear()
            stuck = [made.start() for _ in range(2)]
            await until(lambda: made.decode[0].open == 2)
            third = made.start()
            await until(lambda: made.dispatcher.waiting == 1)
            assert await _add(made, new, "decode", epoch=1) == 200
            answer = await third
            assert (answer.status, answer.decode) == (200, "decode-1")
            made.decode[0].answers.set()
            assert [(await each).status for each in stuck] == [200, 200]

    asyncio.run(case())


@pytest.mark.parametrize("workers", [1, 2])
def test_a27_a_replica_is_drained_once_its_engine_has_ended_what_was_closed(workers: int) -> None:
    """Whoever drains it is going to pause it, and an abort can be under way long after a client has left."""

    async def case() -> None:
        async with bench(fenced=True, workers=workers) as made:
            fence = made.decode[0].fence
            assert fence is not None
            aborted_slowly = fence.accept("r-1")
            answer = await made.command("/replicas/decode-0/drain", {"timeout_s": 0.1})
            assert answer.json["legs_in_flight"] == 1
            draining = asyncio.create_task(made.command("/replicas/decode-0/drain", {"timeout_s": 30}))
            await turns()
            assert not draining.done()
            fence.end(aborted_slowly)
            assert (await draining).json["legs_in_flight"] == 0

    asyncio.run(case())


def test_draining_waits_for_its_legs_and_moves_its_sessions() -> None:
    async def case() -> None:
        async with bench(decode=2) as made:
            first = made.decode[0]
            first.answers.clear()
            running = made.start(session="s")
            await until(lambda: first.open == 1)
            at_once = await made.command("/replicas/decode-0/drain", {})
            assert (at_once.status, at_once.json["legs_in_flight"]) == (200, 1)
            assert (await made.post(session="s")).decode == "decode-1"
            draining = asyncio.create_task(made.command("/replicas/decode-0/drain", {"timeout_s": 30}))
            await turns()
            assert not draining.done()
            first.answers.set()
            assert (await draining).json == {"name": "decode-0", "draining": True, "legs_in_flight": 0}
            assert (await running).status == 200
            assert await made.metric("active_sessions", replica="decode-0") == 0
            assert {(await made.post()).decode for _ in range(3)} == {"decode-1"}
            back = await made.command("/replicas/decode-0/drain", {"draining": False})
            assert (back.status, back.json["draining"]) == (200, False)
            assert "decode-0" in {(await made.post()).decode for _ in range(3)}

    asyncio.run(case())


def test_a_drain_that_takes_too_long_says_what_is_left() -> None:
    async def case() -> None:
        async with bench() as made:
            made.decode[0].answers.clear()
            running = made.start()
            await until(lambda: made.decode[0].open == 1)
            answer = await made.command("/replicas/decode-0/drain", {"timeout_s": 0.1})
            assert (answer.status, answer.json["legs_in_flight"]) == (200, 1)
            made.decode[0].answers.set()
            assert (await running).status == 200

    asyncio.run(case())


def test_a_replica_that_is_removed_is_forgotten_with_its_sessions_and_legs() -> None:
    async def case() -> None:
        async with bench(decode=2) as made:
            first = made.decode[0]
            first.silent = True
            running = made.start(session="s")
            await until(lambda: first.open == 1)
            answer = await made.command("/replicas/decode-0", method="DELETE")
            assert (answer.status, answer.json["removed"]) == (200, True)
            moved = await running
            assert (moved.status, moved.decode) == (200, "decode-1")
            await until(lambda: first.open == 0)
            assert [each["name"] for each in (await made.state())["replicas"]] == ["prefill-0", "decode-1"]
            assert b'"decode-0"' not in (await made.get("/metrics")).raw
            assert (await made.post(session="s")).decode == "decode-1"

    asyncio.run(case())


def test_the_last_replica_of_a_role_can_go_and_another_can_come() -> None:
    async def case() -> None:
        new = new_stub("decode", 7)
        async with bench() as made, new.running():
            assert (await made.command("/replicas/decode-0", method="DELETE")).status == 200
            answer = await made.post()
            assert (answer.status, "decode" in answer.message) == (503, True)
            assert await _add(made, new, "decode", epoch=1) == 200
            await until(lambda: made.is_usable("decode-7"))
            assert (await made.post()).decode == "decode-7"

    asyncio.run(case())


@pytest.mark.parametrize("stream", [False, True])
def test_another_life_under_the_same_name_takes_nothing_over(stream: bool) -> None:
    async def case() -> None:
        async with bench(fenced=True, decode=2) as made:
            first = made.decode[0]
            assert (await made.post(session="s")).decode == "decode-0"
            first.silent = True
            running = made.start(session="s", stream=stream)
            await until(lambda: first.open == 1)
            new = new_stub("decode", 0, fenced=True)
            assert new.fence is not None
            new.fence.instance, new.fence.epoch = "decode-0.b", 1
            async with new.running():
                assert await _add(made, new, "decode", instance="decode-0.b", epoch=1) == 200
                # The leg of the old life ends, and its session has moved by then.
                moved = await running
                assert (moved.status, moved.decode) == (200, "decode-1")
                await until(lambda: first.open == 0)
                assert await made.metric("active_sessions", replica="decode-0") == 0
                await until(lambda: made.is_usable("decode-0"))
                assert (await made.post(session="s")).decode == "decode-1"
                assert (await made.post(session="t")).decode == "decode-0"
                assert new.requests[0].headers["x-headrace-instance"] == "decode-0.b"
                assert len(first.requests) == 2

    asyncio.run(case())


def test_the_same_life_added_again_goes_on_with_its_legs_and_sessions() -> None:
    async def case() -> None:
        async with bench(fenced=True, decode=2) as made:
            decode = made.decode[0]
            decode.answers.clear()
            running = made.start(session="s")
            await until(lambda: decode.open == 1)
            for epoch in ({"epoch": 1}, {}):
                assert await _add(made, decode, "decode", instance="decode-0.a", **epoch) == 200
            decode.answers.set()
            answer = await running
            assert (answer.status, answer.decode, decode.closed_early) == (200, "decode-0", 0)
            assert (await made.post(session="s")).headers["x-headrace-choice"] == "prefill=pinned, decode=pinned"

    asyncio.run(case())


@pytest.mark.parametrize("path", ["/replicas/nobody/drain", "/replicas/nobody"])
def test_a_name_that_nobody_has_is_404(path: str) -> None:
    async def case() -> None:
        async with bench() as made:
            answer = await made.command(path, {}, "POST" if path.endswith("drain") else "DELETE")
            assert (answer.status, answer.json["error"]["param"]) == (404, "name")
            assert "nobody" in answer.message

    asyncio.run(case())


GOOD = {"name": "decode-1", "role": "decode", "url": "http://127.0.0.1:9"}


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"name": None}, "name"),
        ({"name": ""}, "name"),
        ({"name": "a/b"}, "name"),
        ({"name": "a\r\nb: c"}, "name"),
        ({"instance": "a b"}, "instance"),
        ({"instance": "a\n"}, "instance"),
        ({"epoch": -1}, "epoch"),
        ({"role": "both"}, "role"),
        ({"url": "127.0.0.1:9"}, "url"),
        ({"url": 9}, "url"),
        ({"epoch": "1"}, "epoch"),
        ({"surprise": 1}, "surprise"),
    ],
)
def test_a_replica_that_makes_no_sense_is_refused(change: dict[str, Any], named: str) -> None:
    async def case() -> None:
        async with bench() as made:
            answer = await made.command("/replicas", {**GOOD, **change})
            assert answer.status == 400
            assert named in answer.message
            assert list(made.dispatcher.fleet.members) == ["prefill-0", "decode-0"]

    asyncio.run(case())


@pytest.mark.parametrize(
    "url",
    ["http://", "http://:80", "http://a b", "http://127.0.0.1:99999", "http://x\r\ny", "http://x/y", "http://x?y"],
)
def test_a_url_that_can_not_be_called_is_refused(url: str) -> None:
    async def case() -> None:
        async with bench() as made:
            answer = await made.command("/replicas", {**GOOD, "url": url})
            assert (answer.status, answer.json["error"]["param"]) == (400, "url")
            assert (await made.post()).status == 200

    asyncio.run(case())
