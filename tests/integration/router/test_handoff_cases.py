"""The age of a handoff, over real HTTP (field case A39)."""

from __future__ import annotations

import asyncio
from typing import Any

from tests.integration.router.harness import Bench, bench, deaf_listener, until


def _ages(made: Bench) -> list[float]:
    """How long before each decode leg its handoff's prefill leg was received."""
    received = {each.request_id: each.at for stub in made.prefill for each in stub.requests}
    return [each.at - received[each.handoff["remote_request_id"]] for stub in made.decode for each in stub.requests]


def test_a39_a_handoff_past_its_lease_is_never_sent() -> None:
    async def case() -> None:
        times: dict[str, Any] = {"handoff_lease_s": 0.6, "handoff_margin_s": 0.2, "connect_timeout_s": 0.3}
        async with bench(**times, retries=1) as made:
            prefill, decode = made.prefill[0], made.decode[0]
            prefill.latency_s = 0.5
            first = made.start()
            await until(lambda: len(prefill.requests) == 1)
            await asyncio.sleep(0.1)
            prefill.latency_s = 0.0
            assert (await first).status == 200
            old, fresh = prefill.requests
            assert decode.requests[0].handoff["remote_request_id"] == fresh.request_id != old.request_id
            assert await made.metric("handoffs_total", outcome="expired") == 1

            # Too slow each time: the decode engine runs the prompt itself, which is right at any age.
            prefill.latency_s = 0.5
            assert (await made.post()).status == 200
            assert "kv_transfer_params" not in decode.requests[1].body
            assert decode.requests[1].computed_prompt_tokens == decode.prompt_tokens
            assert await made.metric("handoffs_total", outcome="expired") == 3
            assert len(prefill.requests) == 4

    asyncio.run(case())


def test_a39_no_handoff_waits_past_its_lease_for_a_connection() -> None:
    async def case() -> None:
        # Connecting may take longer than what the prefill leg leaves of the lease.
        times: dict[str, Any] = {"handoff_lease_s": 0.8, "handoff_margin_s": 0.2, "connect_timeout_s": 0.5}
        async with bench(**times, retries=1, probe_interval_s=30.0, probe_timeout_s=30.0) as made:
            made.prefill[0].latency_s = 0.3
            port = made.decode[0].port
            await made.decode[0].stop()
            with deaf_listener(port):
                answer = await made.post()
            first, second = made.prefill[0].requests
            assert first.request_id != second.request_id
            assert await made.metric("handoffs_total", outcome="expired") == 2
            assert await made.metric("legs_total", role="decode", outcome="expired") == 2
            # The last leg, without a handoff, had all the time that connecting may take: that is the replica's fault.
            assert await made.metric("legs_total", role="decode", outcome="unreachable") == 1
            assert answer.status == 503

    asyncio.run(case())


def test_a39_a_barrier_longer_than_the_lease_serves_no_old_handoff() -> None:
    async def case() -> None:
        lease_s, margin_s = 1.0, 0.3
        times: dict[str, Any] = {"handoff_lease_s": lease_s, "handoff_margin_s": margin_s, "connect_timeout_s": 0.5}
        async with bench(**times, decode=2) as made:
            prefill = made.prefill[0]
            prefill.answers.clear()
            running = [made.start() for _ in range(8)]
            await until(lambda: prefill.open == 8)
            await made.set_gate("frozen")
            prefill.answers.set()
            await until(lambda: prefill.open == 0)
            await asyncio.sleep(2 * lease_s)
            assert [stub.requests for stub in made.decode] == [[], []]
            await made.set_gate("open")
            assert [(await each).status for each in running] == [200] * 8
            assert len(_ages(made)) == 8
            assert max(_ages(made)) < lease_s
            assert await made.metric("handoffs_total", outcome="expired") == 8
            assert len(prefill.requests) == 16

    asyncio.run(case())


def test_a39_a_handoff_that_ages_in_line_for_room_is_renewed() -> None:
    async def case() -> None:
        times: dict[str, Any] = {"handoff_lease_s": 0.6, "handoff_margin_s": 0.2, "connect_timeout_s": 0.3}
        async with bench(**times, max_legs_per_replica=1) as made:
            decode = made.decode[0]
            decode.answers.clear()
            first = made.start()
            await until(lambda: decode.open == 1)
            second = made.start()
            await until(lambda: made.dispatcher.waiting == 1)
            await asyncio.sleep(0.7)
            decode.answers.set()
            assert [(await each).status for each in (first, second)] == [200, 200]
            assert max(_ages(made)) < 0.6
            assert await made.metric("handoffs_total", outcome="expired") == 1

    asyncio.run(case())
