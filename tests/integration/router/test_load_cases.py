"""Load, sessions and clients that leave, over real HTTP (field cases A08 to A12)."""

from __future__ import annotations

import asyncio
import json
import time
from collections import Counter

import pytest

from tests.integration.router.harness import COMPLETIONS, LeavingClient, bench, until


def test_a08_a_streaming_replica_counts_as_busy_to_the_last_byte() -> None:
    async def case() -> None:
        async with bench(decode=2) as made:
            busy, idle = made.decode
            busy.first_token_s, busy.token_s = 0.3, 0.3
            data = json.dumps({"prompt": "hello", "stream": True}).encode()
            headers = {"x-session-id": "long"}
            async with made.client.post(made.url + COMPLETIONS, data=data, headers=headers) as reply:
                first = await reply.content.readline()
                assert time.monotonic() - busy.sent_at[0] < 0.2
                assert first.startswith(b"data: ")
                assert await made.metric("legs_in_flight", replica=busy.name) == 1
                assert await made.metric("tokens_in_flight", replica=busy.name) > 0
                assert (await made.post(session="new")).decode == idle.name
                assert await made.metric("legs_in_flight", replica=busy.name) == 1
                await reply.read()
            ended = time.monotonic()
            while await made.metric("legs_in_flight", replica=busy.name):
                assert time.monotonic() - ended < 0.1
            assert await made.metric("legs_in_flight") == await made.metric("tokens_in_flight") == 0

    asyncio.run(case())


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("silence", ["before the headers", "between tokens"])
def test_a09_a_client_that_leaves_a_silent_engine(stream: bool, silence: str) -> None:
    async def case() -> None:
        async with bench() as made:
            decode = made.decode[0]
            if silence == "before the headers":
                decode.silent = True
            else:
                decode.token_s = 30.0
            client = await LeavingClient.sending(made, stream=stream, session_id="s")
            await until(lambda: decode.open == 1)
            left = await client.leave()
            await until(lambda: decode.open == 0)
            assert time.monotonic() - left < 1.0
            assert decode.closed_early == 1
            state = await made.state()
            assert (state["admitted"], state["waiting"]) == (0, 0)
            assert await made.metric("legs_in_flight") == 0
            assert await made.metric("client_gone_total") == 1
            await made.finish("s")
            assert await made.metric("active_sessions") == 0

    asyncio.run(case())


def test_a09_no_decode_leg_after_a_client_that_left() -> None:
    async def case() -> None:
        async with bench() as made:
            made.prefill[0].silent = True
            client = await LeavingClient.sending(made)
            await until(lambda: made.prefill[0].open == 1)
            await client.leave()
            await until(lambda: made.prefill[0].open == 0, 1.0)
            assert await made.metric("legs_in_flight") == await made.metric("active_sessions") == 0
            assert await made.metric("legs_total", role="prefill", outcome="cancelled") == 1
            assert len(made.prefill[0].requests) == 1
            assert made.decode[0].requests == []

    asyncio.run(case())


def test_a10_abandoned_requests_are_not_tried_again() -> None:
    async def case() -> None:
        async with bench(prefill=2) as made:
            first, second = made.prefill
            first.answers.clear()
            second.answers.clear()
            clients = await asyncio.gather(*(LeavingClient.sending(made) for _ in range(100)))
            await until(lambda: first.open + second.open == 100)
            for number, client in enumerate(clients):
                if number == 50:
                    # Half of them leave before their prefill is ready, half at that very moment.
                    first.answers.set()
                    second.answers.set()
                client.writer.close()
            await until(lambda: made.dispatcher.admitted == 0)
            assert len(first.requests) + len(second.requests) == 100
            # A client's close and its prefill's answer may come in either order; each decode leg there was is ended.
            await until(lambda: made.decode[0].open == 0)
            assert len(made.decode[0].requests) <= 50
            assert await made.metric("retries_total") == 0
            assert await made.metric("legs_in_flight") == await made.metric("active_sessions") == 0
            for client in clients:
                await client.leave()

    asyncio.run(case())


def test_a10_a_hundred_clients_that_leave_during_prefill_cost_no_decode_leg() -> None:
    async def case() -> None:
        async with bench() as made:
            prefill = made.prefill[0]
            prefill.answers.clear()
            clients = await asyncio.gather(*(LeavingClient.sending(made) for _ in range(100)))
            await until(lambda: prefill.open == 100)
            for client in clients:
                await client.leave()
            await until(lambda: prefill.open == 0)
            prefill.answers.set()
            assert (len(prefill.requests), prefill.closed_early) == (100, 100)
            assert made.decode[0].requests == []

    asyncio.run(case())


def test_a10_a_live_request_gets_at_most_one_plus_retries_prefill_legs() -> None:
    async def case() -> None:
        async with bench(prefill=4, decode=4, retries=2) as made:
            for stub in made.decode:
                stub.status = 503
            answer = await made.post()
            assert (answer.status, answer.json["error"]["code"]) == (503, 503)
            assert sum(len(stub.requests) for stub in made.prefill) == 3
            assert [len(stub.requests) for stub in made.decode].count(1) == 3
            sent = {json.dumps(stub.requests[0].handoff) for stub in made.decode if stub.requests}
            assert len(sent) == 3

    asyncio.run(case())


def test_a10_a_handoff_that_nobody_uses_is_counted() -> None:
    async def case() -> None:
        async with bench(max_legs_per_replica=1) as made:
            made.decode[0].answers.clear()
            first = made.start()
            await until(lambda: made.decode[0].open == 1)
            client = await LeavingClient.sending(made)
            await until(lambda: made.dispatcher.waiting == 1 and len(made.prefill[0].requests) == 2)
            await client.leave()
            await until(lambda: made.dispatcher.waiting == 0)
            assert await made.metric("handoffs_total", outcome="unused") == 1
            made.decode[0].answers.set()
            assert (await first).status == 200
            assert len(made.decode[0].requests) == 1

    asyncio.run(case())


def test_a11_serial_sessions_spread_evenly() -> None:
    async def case() -> None:
        async with bench(prefill=4, decode=4) as made:
            for number in range(8):
                assert (await made.post(session=f"s{number}")).status == 200
                await made.finish(f"s{number}")
            for stubs in (made.prefill, made.decode):
                assert [len(stub.requests) for stub in stubs] == [2, 2, 2, 2]

    asyncio.run(case())


def test_a11_still_even_where_a_worker_is_drained_and_returns() -> None:
    async def case() -> None:
        async with bench(prefill=4, decode=4) as made:
            for number in range(8):
                assert (await made.post(session=f"s{number}")).status == 200
                await made.finish(f"s{number}")
                if number in (2, 4):
                    for name in ("prefill-2", "decode-2"):
                        answer = await made.command(f"/replicas/{name}/drain", {"draining": number == 2})
                        assert answer.status == 200
            for stubs in (made.prefill, made.decode):
                counts = [len(stub.requests) for stub in stubs]
                assert sum(counts) == 8
                assert max(counts) - min(counts) <= 1

    asyncio.run(case())


def test_a_session_stays_and_requests_without_one_spread() -> None:
    async def case() -> None:
        async with bench(prefill=2, decode=3) as made:
            replies = [await made.post(session="s") for _ in range(4)]
            assert len({(each.prefill, each.decode) for each in replies}) == 1
            in_body = await made.post(session_id="s")
            assert in_body.decode == replies[0].decode
            spread = Counter([(await made.post()).decode for _ in range(6)])
            assert spread == {stub.name: 3 for stub in made.decode if stub.name != replies[0].decode}

    asyncio.run(case())


def test_a12_every_end_releases_its_session() -> None:
    async def case() -> None:
        async with bench(prefill=2, decode=2) as made:
            for number in range(4):
                assert (await made.post(session=f"normal{number}")).status == 200
            for stub in made.decode:
                stub.status = 400
            for number in range(3):
                assert (await made.post(session=f"error{number}")).status == 400
            for stub in made.decode:
                stub.status, stub.silent = 200, True
            for number in range(3):
                client = await LeavingClient.sending(made, session_id=f"abort{number}")
                await until(lambda: any(stub.open for stub in made.decode))
                await client.leave()
                await until(lambda: not any(stub.open for stub in made.decode))
            assert await made.metric("active_sessions", role="decode") == 10
            counts = {"normal": 4, "error": 3, "abort": 3}
            names = [f"{kind}{number}" for kind, count in counts.items() for number in range(count)]
            for name in names * 2:
                answer = await made.finish(name)
                assert (answer.status, answer.json["session_id"]) == (200, name)
            assert await made.metric("active_sessions") == 0

    asyncio.run(case())


def test_a12_an_unfinished_session_expires_but_not_during_a_request() -> None:
    async def case() -> None:
        policy = {"type": "sticky_least_loaded", "session_idle_s": 0.3}
        async with bench(policy=policy, probe_interval_s=0.05) as made:
            decode = made.decode[0]
            decode.answers.clear()
            running = made.start(session="s")
            await until(lambda: decode.open == 1)
            # Longer than the session may be idle, and than the router takes to notice.
            await asyncio.sleep(0.7)
            assert await made.metric("active_sessions", role="decode") == 1
            decode.answers.set()
            assert (await running).status == 200
            assert await made.metric("active_sessions", role="decode") == 1
            await until(lambda: len(made.dispatcher.fleet.sessions) == 0)
            assert await made.metric("active_sessions") == 0

    asyncio.run(case())


def test_a12_a_dead_replicas_sessions_move_and_stay() -> None:
    async def case() -> None:
        async with bench(decode=2) as made:
            dead = (await made.post(session="s")).decode
            await next(stub for stub in made.decode if stub.name == dead).stop()
            moved = [await made.post(session="s") for _ in range(3)]
            assert [each.status for each in moved] == [200] * 3
            assert {each.decode for each in moved} == {"decode-0", "decode-1"} - {dead}
            assert await made.metric("active_sessions", replica=dead) == 0

    asyncio.run(case())
