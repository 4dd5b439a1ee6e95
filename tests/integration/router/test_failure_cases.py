"""Engines that fail, over real HTTP (field cases A13 to A17, A22)."""

from __future__ import annotations

import asyncio
import time

import pytest

from tests.integration.router.harness import Bench, bench, until


@pytest.mark.parametrize("status", [400, 401, 403, 404, 413, 422, 429])
def test_a13_the_clients_mistakes_blame_nobody(status: int) -> None:
    async def case() -> None:
        async with bench() as made:
            decode = made.decode[0]
            decode.status, decode.error_body = status, b'{"error": {"message": "too long",  "code": 7}}'
            times = 50 if status == 400 else 5
            for _ in range(times):
                answer = await made.post()
                assert (answer.status, answer.raw) == (status, decode.error_body)
            assert len(decode.requests) == len(made.prefill[0].requests) == times
            assert {each["breaker"] for each in (await made.state())["replicas"]} == {"closed"}
            assert await made.metric("replica_up") == 2
            assert await made.metric("retries_total") == 0
            decode.status = 200
            assert (await made.post()).status == 200

    asyncio.run(case())


@pytest.mark.parametrize("failure", [500, 502, 503, 504, None])
def test_a13_an_engines_failures_count(failure: int | None) -> None:
    async def case() -> None:
        async with bench(decode=2, leg_failures=3, retries=0, breaker_open_s=60.0) as made:
            bad = made.decode[0]
            bad.status, bad.drop = failure or 200, failure is None
            await made.command("/replicas/decode-1/drain", {"draining": True})
            for _ in range(3):
                assert made.is_usable(bad.name)
                assert (await made.post()).status == (failure or 502)
            assert not made.is_usable(bad.name)
            await made.command("/replicas/decode-1/drain", {"draining": False})
            assert (await made.post()).decode == "decode-1"

    asyncio.run(case())


def test_a14_a_leg_that_takes_too_long_is_closed_before_its_retry() -> None:
    async def case() -> None:
        async with bench(decode=2, leg_timeout_s=1.0, retries=1) as made:
            first, second = made.decode
            first.silent = True
            answer = await made.post()
            assert (answer.status, answer.decode) == (200, second.name)
            assert (len(first.requests), len(second.requests)) == (1, 1)
            (closed_at,) = first.closed_at
            assert first.requests[0].at + 0.99 <= closed_at < second.requests[0].at
            assert await made.metric("legs_total", role="decode", outcome="timeout") == 1

    asyncio.run(case())


@pytest.mark.parametrize("role", ["prefill", "decode"])
@pytest.mark.parametrize("stream", [False, True])
def test_a14_what_waits_for_a_replica_that_hangs_is_closed_and_run_elsewhere(role: str, stream: bool) -> None:
    async def case() -> None:
        async with bench(prefill=2, decode=2, silence_limit_s=0.3) as made:
            first, second = getattr(made, role)
            first.answers.clear()
            answer = made.start(stream=stream)
            await until(lambda: first.open == 1)
            first.lives.clear()
            assert (await answer).status == 200
            assert getattr(await answer, role) == second.name
            (closed_at,) = first.closed_at
            assert closed_at < second.requests[-1].at
            assert {each["breaker"] for each in (await made.state())["replicas"]} == {"closed", "open"}
            first.lives.set()
            await until(lambda: made.is_usable(first.name))

    asyncio.run(case())


def test_a15_a_leg_may_wait_for_as_long_as_its_replica_answers_probes() -> None:
    async def case() -> None:
        async with bench(decode=2, silence_limit_s=0.2) as made:
            first, _ = made.decode
            first.answers.clear()
            answer = made.start()
            await until(lambda: first.open == 1)
            await asyncio.sleep(0.6)
            assert (first.open, made.is_usable(first.name)) == (1, True)
            first.answers.set()
            assert (await answer).decode == first.name

    asyncio.run(case())


@pytest.mark.parametrize("stream", [False, True])
def test_the_time_of_a_request_covers_both_legs_and_all_attempts(stream: bool) -> None:
    async def case() -> None:
        async with bench(request_timeout_s=0.6) as made:
            made.prefill[0].latency_s, made.decode[0].silent = 0.35, True
            started = time.monotonic()
            answer = await made.post(stream=stream)
            assert 0.5 < time.monotonic() - started < 3
            assert answer.status == 504
            assert answer.json["error"]["type"] == "GatewayTimeoutError"
            assert (len(made.prefill[0].requests), len(made.decode[0].requests)) == (1, 1)
            await until(lambda: made.decode[0].closed_early == 1)
            assert await made.metric("legs_total", role="decode", outcome="timeout") == 1
            assert await made.metric("replica_up") == 2

    asyncio.run(case())


@pytest.mark.parametrize("stream", [False, True])
def test_a_leg_on_a_replica_that_is_lost_ends_at_once(stream: bool) -> None:
    async def case() -> None:
        async with bench(probe_failures=2) as made:
            decode = made.decode[0]
            decode.silent = True
            answer = made.start(stream=stream)
            await until(lambda: decode.open == 1)
            decode.healthy = False
            assert (await asyncio.wait_for(answer, 3)).status == 503
            assert await made.metric("legs_total", role="decode", outcome="unreachable") == 1
            assert await made.metric("legs_in_flight") == 0
            await until(lambda: decode.closed_early == 1)

    asyncio.run(case())


def test_failed_legs_that_take_a_replica_out_free_those_that_wait_there() -> None:
    async def case() -> None:
        async with bench(decode=2, leg_failures=1, retries=1) as made:
            first, second = made.decode
            first.silent = True
            waiting = made.start(session="s")
            await until(lambda: first.open == 1)
            first.silent, first.drop = False, True
            assert (await made.post(session="s")).decode == second.name
            answer = await asyncio.wait_for(waiting, 3)
            assert (answer.status, answer.decode) == (200, second.name)

    asyncio.run(case())


def test_a15_a_stream_on_a_lost_replica_goes_on_while_bytes_come_and_ends_when_it_falls_silent() -> None:
    async def case() -> None:
        async with bench(silence_limit_s=0.5, probe_failures=1) as made:
            decode = made.decode[0]
            decode.tokens, decode.token_s = ["t"] * 8, 0.1
            flowing = made.start(stream=True)
            await until(lambda: len(decode.sent_at) == 1)
            decode.healthy = False
            await until(lambda: not made.is_usable(decode.name))
            answer = await flowing
            assert [each["choices"][0]["text"] for each in answer.events] == ["t"] * 8

            decode.healthy = True
            await until(lambda: made.is_usable(decode.name))
            decode.token_s = 60.0
            silent = made.start(stream=True)
            await until(lambda: len(decode.sent_at) == 9)
            decode.healthy = False
            answer = await asyncio.wait_for(silent, 3)
            assert answer.events[-1]["error"]["code"] == 503

    asyncio.run(case())


def test_a15_a_busy_replica_survives_slow_probes_and_an_idle_one_does_not() -> None:
    async def case() -> None:
        async with bench(silence_limit_s=1.0) as made:
            decode = made.decode[0]
            decode.tokens, decode.token_s, decode.health_s = ["t"] * 32, 0.1, 5.0
            answer = made.start(stream=True)
            await until(lambda: len(decode.sent_at) == 30, timeout_s=20)
            assert await made.metric("replica_up", replica=decode.name) == 1
            assert (await answer).status == 200
            await until(lambda: not made.is_usable(decode.name))
            refused = await made.post()
            assert (refused.status, refused.headers["Retry-After"]) == (503, "1")
            assert "decode" in refused.message
            decode.health_s = 0.0
            await until(lambda: made.is_usable(decode.name))
            assert (await made.post()).status == 200

    asyncio.run(case())


def test_a16_a_connection_that_its_engine_has_closed_costs_no_request() -> None:
    async def case() -> None:
        async with bench(retries=0, probe_interval_s=30.0) as made:
            made.prefill[0].drop_reused = made.decode[0].drop_reused = True
            for number in range(20):
                assert (await made.post(session="s")).status == 200, number
            for stub in (made.prefill[0], made.decode[0]):
                assert stub.reused == 19
                ids = [each.request_id for each in stub.requests]
                # Each that was dropped came once more, as the same request.
                assert sorted({ids.count(each) for each in ids}) == [1, 2]
                assert len(set(ids)) == 20
            assert await made.metric("retries_total") == 0
            assert await made.metric("replica_up") == 2

    asyncio.run(case())


def test_a16_a_reset_on_a_fresh_connection_is_the_engines_failure() -> None:
    async def case() -> None:
        # Probes leave connections behind too: none may be young enough.
        async with bench(retries=0, keepalive_s=0.001, probe_interval_s=30.0) as made:
            made.decode[0].drop = True
            assert (await made.post()).status == 502
            assert len(made.decode[0].requests) == 1

    asyncio.run(case())


def test_a16_a_reset_after_a_byte_is_the_engines_failure() -> None:
    async def case() -> None:
        async with bench(retries=0) as made:
            decode = made.decode[0]
            assert (await made.post()).status == 200
            decode.break_after = 0
            assert (await made.post(stream=True)).status == 502
            assert (decode.reused, len(decode.requests)) == (1, 2)

    asyncio.run(case())


def test_a16_the_router_closes_idle_connections_before_the_engine_does() -> None:
    async def case() -> None:
        async with bench(keepalive_s=0.2, probe_interval_s=30.0) as made:
            assert (await made.post()).status == 200
            assert made.decode[0].connections > 0
            await until(lambda: made.decode[0].connections == made.prefill[0].connections == 0)
            assert (await made.post()).status == 200

    asyncio.run(case())


@pytest.mark.parametrize("stream", [False, True])
def test_a17_an_error_behind_a_200_is_an_error(stream: bool) -> None:
    async def case() -> None:
        async with bench(retries=1) as made:
            made.decode[0].finish_reason, made.decode[0].stream_error = "error", True
            answer = await made.post(stream=stream)
            assert answer.status == 502
            assert answer.json["error"]["code"] == 502
            assert await made.metric("legs_total", role="decode", outcome="engine_error") == 2
            assert await made.metric("retries_total") == 1

    asyncio.run(case())


@pytest.mark.parametrize("body", [b"", b"<html>busy</html>", b'{"choices": [', b"\x1f\x8b\x08"])
def test_a17_what_is_no_reply_behind_a_200_is_an_error(body: bytes) -> None:
    async def case() -> None:
        async with bench(decode=2, retries=1) as made:
            for stub in made.decode:
                stub.raw = body
            assert (await made.post()).status == 502
            made.decode[0].raw = None
            assert (await made.post()).status == 200
            assert await made.metric("legs_total", role="decode", outcome="engine_error") >= 2

    asyncio.run(case())


def test_a17_an_error_behind_a_prefill_legs_200_is_tried_elsewhere() -> None:
    async def case() -> None:
        async with bench(prefill=2) as made:
            made.prefill[0].finish_reason = "error"
            answer = await made.post()
            assert (answer.status, answer.prefill) == (200, "prefill-1")
            assert await made.metric("legs_total", role="prefill", outcome="engine_error") == 1

    asyncio.run(case())


@pytest.mark.parametrize("stream", [False, True])
def test_a22_a_lost_block_is_retried_with_a_fresh_handoff(stream: bool) -> None:
    async def case() -> None:
        async with bench() as made:
            decode = made.decode[0]
            decode.status, decode.fail_first = 500, 1
            answer = await made.post(stream=stream)
            assert answer.status == 200
            handoffs = [each.handoff["remote_request_id"] for each in decode.requests]
            assert len(made.prefill[0].requests) == 2
            assert len(set(handoffs)) == 2
            assert await made.metric("retries_total") == 1
            assert await made.metric("handoffs_total", outcome="sent") == 2
            assert await made.metric("replica_up") == 2

    asyncio.run(case())


def test_a22_a_stream_that_begins_with_an_error_is_retried() -> None:
    async def case() -> None:
        async with bench(decode=2) as made:
            made.decode[0].stream_error = True
            answer = await made.post(stream=True)
            assert (answer.status, answer.decode) == (200, "decode-1")
            assert len(answer.events) == 4
            assert len(made.prefill[0].requests) == 2

    asyncio.run(case())


def test_a_stream_that_breaks_is_not_retried_and_says_so() -> None:
    async def case() -> None:
        async with bench() as made:
            made.decode[0].break_after = 2
            answer = await made.post(stream=True)
            assert answer.status == 200
            assert [each["choices"][0]["text"] for each in answer.events[:-1]] == ["a", "b"]
            assert answer.events[-1]["error"]["code"] == 502
            assert len(made.decode[0].requests) == 1
            assert await made.metric("legs_total", role="decode", outcome="broken") == 1
            assert await made.metric("legs_in_flight") == 0

    asyncio.run(case())


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_a_dead_engine_means_503_and_its_return_needs_no_restart(role: str) -> None:
    async def case() -> None:
        async with bench(breaker_open_s=0.1) as made:
            stub = getattr(made, role)[0]
            port = stub.port
            await stub.stop()
            answer = await made.post()
            assert (answer.status, answer.headers["Retry-After"]) == (503, "1")
            assert role in answer.message
            ready = await made.get("/ready")
            assert (ready.status, role in ready.message) == (503, True)
            assert await made.metric("replica_up", role=role) == 0
            await stub.start(port)
            await until(lambda: made.is_usable(stub.name))
            assert (await made.post()).status == 200

    asyncio.run(case())


def test_a17_handoffs_that_fail_in_a_row_are_counted_with_the_prefill_replica_that_made_them() -> None:
    async def failed(made: Bench) -> dict[str, int]:
        return {each["name"]: each["handoffs_failed"] for each in (await made.state())["replicas"]}

    async def case() -> None:
        async with bench(decode=2, retries=0, leg_failures=100) as made:
            poisoned = made.decode[0]
            poisoned.finish_reason, made.decode[1].finish_reason = "error", "error"
            for _ in range(3):
                assert (await made.post()).status == 502
            assert await failed(made) == {"prefill-0": 3, "decode-0": 0, "decode-1": 0}
            # A lost connection is no word about the handoff.
            poisoned.drop = made.decode[1].drop = True
            assert (await made.post()).status != 200
            assert (await failed(made))["prefill-0"] == 3
            for stub in made.decode:
                stub.drop, stub.finish_reason = False, "length"
            await until(lambda: made.is_usable("decode-0") or made.is_usable("decode-1"))
            assert (await made.post()).status == 200
            assert (await failed(made))["prefill-0"] == 0

    asyncio.run(case())
