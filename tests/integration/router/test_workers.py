"""Several worker processes behind one port: one line, one load, one set of counters, one gate."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from pathlib import Path

import aiohttp
import pytest

from router.io.crew import Crew
from router.io.desk import Desk
from router.io.metrics import Metrics
from tests.integration.router.harness import (
    COMPLETIONS,
    TOKEN,
    Bench,
    LeavingClient,
    bench,
    make_settings,
    turns,
    until,
)

WORKERS = 2


async def _each_on_its_own_connection(made: Bench, count: int) -> list[dict[str, str]]:
    """Headers of the replies; the kernel spreads connections over the workers."""
    headers = []
    for number in range(count):
        body = {"prompt": "hello", "session_id": f"s{number}"}
        async with aiohttp.ClientSession() as client, client.post(made.url + COMPLETIONS, json=body) as reply:
            assert reply.status == 200
            headers.append(dict(reply.headers))
    return headers


def _workers() -> list[int]:
    """Their process ids. Children that have ended are of other tests."""
    children = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
    return [int(each) for each in children if _lives(each)]


def _lives(pid: str) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_a38_counters_are_one_whichever_worker_answers() -> None:
    async def case() -> None:
        async with bench(workers=WORKERS) as made:
            seen = []
            for _ in range(20):
                await _each_on_its_own_connection(made, 5)
                async with aiohttp.ClientSession() as client, client.get(made.url + "/metrics") as reply:
                    text = await reply.text()
                line = next(
                    each
                    for each in text.splitlines()
                    if each.startswith("headrace_router_requests_total") and COMPLETIONS in each
                )
                seen.append(float(line.split()[-1]))
            assert seen == sorted(seen)
            assert seen[-1] == 100
            assert await made.metric("legs_total", role="decode", outcome="ok") == 100

    asyncio.run(case())


def test_a_worker_that_hangs_does_not_hide_the_counters_of_the_others() -> None:
    async def case() -> None:
        async with bench(workers=WORKERS) as made, aiohttp.ClientSession() as client:
            await _each_on_its_own_connection(made, 10)
            await made.metric("active_sessions")
            hanging = _workers()[-1]
            os.kill(hanging, signal.SIGSTOP)
            try:
                # The kernel gives some of these to the worker that hangs.
                looks = [asyncio.create_task(client.get(made.url + "/metrics")) for _ in range(16)]
                done, others = await asyncio.wait(looks, return_when=asyncio.FIRST_COMPLETED)
                for each in others:
                    each.cancel()
                assert "headrace_router_requests_total" in await done.pop().result().text()
            finally:
                os.kill(hanging, signal.SIGCONT)

    asyncio.run(case())


def test_a_worker_that_hangs_is_ended_and_the_gate_moves_on() -> None:
    async def case() -> None:
        async with bench(workers=WORKERS, worker_timeout_s=1.0) as made:
            hanging = _workers()[-1]
            os.kill(hanging, signal.SIGSTOP)
            for state in ("holding", "open"):
                await made.set_gate(state)
            await until(lambda: len(_workers()) == WORKERS and hanging not in _workers())
            await _each_on_its_own_connection(made, 10)

    asyncio.run(case())


def test_a_gate_that_opens_opens_for_all_although_who_asked_has_left() -> None:
    async def case() -> None:
        async with bench(workers=WORKERS, gate="frozen", worker_timeout_s=1.0) as made:
            hanging = _workers()[-1]
            os.kill(hanging, signal.SIGSTOP)
            opening = asyncio.create_task(made.set_gate("open"))
            await turns()
            opening.cancel()
            await until(lambda: made.dispatcher.gate.state == "open")
            os.kill(hanging, signal.SIGCONT)
            await _each_on_its_own_connection(made, 10)

    asyncio.run(case())


def test_sessions_stay_and_spread_whichever_worker_answers() -> None:
    async def case() -> None:
        async with bench(workers=WORKERS, prefill=2, decode=4) as made:
            first = await _each_on_its_own_connection(made, 8)
            again = await _each_on_its_own_connection(made, 8)
            where = [(each["x-headrace-prefill"], each["x-headrace-decode"]) for each in first]
            assert where == [(each["x-headrace-prefill"], each["x-headrace-decode"]) for each in again]
            assert [len(stub.requests) for stub in made.decode] == [4] * 4
            assert [len(stub.requests) for stub in made.prefill] == [8] * 2
            assert {each.headers["authorization"] for stub in made.engines for each in stub.requests} == {
                f"Bearer {TOKEN}"
            }
            assert len({each.body["cache_salt"] for stub in made.engines for each in stub.requests}) == 1
            assert len({each.request_id for stub in made.decode for each in stub.requests}) == 16
            for number in range(8):
                await made.finish(f"s{number}")
            assert await made.metric("active_sessions") == 0

    asyncio.run(case())


def test_a_hold_counts_when_every_worker_has_it_and_all_are_readmitted() -> None:
    async def case() -> None:
        async with bench(workers=WORKERS, fenced=True) as made:
            decode = made.decode[0]
            decode.accepts.clear()
            decode.answers.clear()
            running = [await LeavingClient.sending(made, stream=True) for _ in range(6)]
            await until(lambda: decode.arrived == 6)
            holding = asyncio.create_task(made.command("/gate", {"gate": "holding"}))
            await turns()
            assert not holding.done()
            decode.accepts.set()
            answer = await holding
            assert (answer.status, answer.json["running"]) == (200, 6)
            waiting = [await LeavingClient.sending(made, stream=True) for _ in range(6)]
            await until(lambda: made.dispatcher.waiting == 6)
            assert len(made.prefill[0].requests) == 6
            readmitted = await made.command("/in_flight", {"mode": "readmit"})
            assert (readmitted.status, readmitted.json["requests"], decode.open) == (200, 6, 0)
            assert made.dispatcher.waiting == 12
            decode.answers.set()
            await made.commit(2, "v2")
            await made.set_gate("open")
            for client in (*running, *waiting):
                reply = await client.reader.readuntil(b"data: [DONE]\n\n")
                assert reply.startswith(b"HTTP/1.1 200")
                assert b"x-headrace-epoch: 2" in reply
                await client.leave()
            assert await made.metric("readmitted_total") == 6

    asyncio.run(case())


def test_a12_samples_on_a_worker_that_dies_leave_no_session() -> None:
    async def case() -> None:
        async with bench(workers=WORKERS) as made:
            made.decode[0].answers.clear()
            client = await LeavingClient.sending(made, n=3)
            await until(lambda: made.decode[0].open == 3)
            for worker in _workers():
                os.kill(worker, signal.SIGKILL)
            await until(lambda: made.dispatcher.admitted == 0)
            assert {member.sessions for member in made.dispatcher.fleet.members.values()} == {0}
            await client.leave()

    asyncio.run(case())


def test_a27_holds_for_the_clients_of_every_worker() -> None:
    async def case() -> None:
        async with bench(workers=WORKERS, fenced=True) as made:
            decode = made.decode[0]
            decode.answers.clear()
            clients = [await LeavingClient.sending(made) for _ in range(6)]
            await until(lambda: decode.open == 6)
            await made.set_gate("frozen")
            for client in clients:
                await client.leave()
            await made.metric_reaches(6, "client_gone_total")
            await turns()
            assert (decode.open, decode.closed_early) == (6, 0)
            thawed = time.monotonic()
            await made.set_gate("open")
            await until(lambda: decode.open == 0)
            assert time.monotonic() - thawed < 1.0
            await until(lambda: made.dispatcher.admitted == 0)

    asyncio.run(case())


def test_an_abort_reaches_whichever_worker_has_the_request() -> None:
    async def case() -> None:
        async with bench(workers=WORKERS) as made:
            decode = made.decode[0]
            decode.answers.clear()
            clients = [await LeavingClient.sending(made, request_id=f"r{number}") for number in range(6)]
            await until(lambda: decode.open == 6)
            for number in range(6):
                body = {"request_id": f"r{number}"}
                async with aiohttp.ClientSession() as http, http.post(made.url + "/abort_requests", json=body) as reply:
                    assert reply.status == 200
            await until(lambda: decode.open == 0)
            for client in clients:
                assert (await client.reader.readline()).split()[1] == b"499"
                await client.leave()
            assert (await made.post("/abort_requests", {"request_id": "r0"})).status == 404

    asyncio.run(case())


def test_a_lost_replica_ends_the_legs_of_every_worker() -> None:
    async def case() -> None:
        async with bench(workers=WORKERS, decode=2) as made:
            first, second = made.decode
            first.silent = True
            await made.command(f"/replicas/{second.name}/drain", {"draining": True})
            clients = [await LeavingClient.sending(made) for _ in range(6)]
            await until(lambda: first.open == 6)
            await made.command(f"/replicas/{second.name}/drain", {"draining": False})
            assert (await made.command(f"/replicas/{first.name}", method="DELETE")).status == 200
            for client in clients:
                assert (await client.reader.readline()).split()[1] == b"200"
                await client.leave()
            assert (first.open, len(second.requests)) == (0, 6)

    asyncio.run(case())


def test_the_total_is_one_for_all_workers() -> None:
    async def case() -> None:
        async with bench(workers=3, max_requests=2) as made:
            decode = made.decode[0]
            decode.answers.clear()
            clients = [await LeavingClient.sending(made) for _ in range(8)]
            await until(lambda: made.dispatcher.waiting == 6)
            await until(lambda: len(made.prefill[0].requests) == 2)
            decode.answers.set()
            for client in clients:
                assert (await client.reader.readline()).split()[1] == b"200"
                await client.leave()

    asyncio.run(case())


def test_a_worker_that_cannot_be_started_may_be_tried_as_often_as_one_likes(monkeypatch: pytest.MonkeyPatch) -> None:
    """More often than there are numbers of workers."""

    async def case() -> None:
        async with bench() as made:
            crew = Crew(make_settings([]), TOKEN, Metrics())
            desk = Desk(made.dispatcher, crew.decided, asyncio.get_running_loop())
            files = len([*Path("/proc/self/fd").iterdir()])
            for _ in range(300):
                with pytest.raises(FileNotFoundError):
                    await crew.start(desk)
            assert len([*Path("/proc/self/fd").iterdir()]) == files

    monkeypatch.setattr(sys, "executable", "/no/such/python")
    asyncio.run(case())
