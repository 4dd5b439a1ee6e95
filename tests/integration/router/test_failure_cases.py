"""Engines and clients that fail, over real HTTP (field cases A10, A13 to A15, A17, A18, A22, A35, A37, A39)."""

from __future__ import annotations

import asyncio
import json
import time

import aiohttp
import pytest
from aiohttp import web
from aiohttp.test_utils import make_mocked_request

from router.io.server import CLIENT_GONE, json_errors
from tests.fakes.stub_engine import HANDOFF
from tests.integration.router.harness import CHAT, COMPLETIONS, bench, deaf_listener, until


@pytest.mark.parametrize("status", [400, 401, 403, 404, 413, 422, 429])
def test_a13_the_clients_mistakes_blame_nobody(status: int) -> None:
    async def case() -> None:
        async with bench() as made:
            decode = made.decode[0]
            decode.status, decode.error_body = status, b'{"error": {"message": "too long",  "code": 7}}'
            for _ in range(50 if status == 400 else 5):
                answer = await made.post()
                assert (answer.status, answer.raw) == (status, decode.error_body)
            sent = len(decode.requests)
            assert sent == len(made.prefill[0].requests) == (50 if status == 400 else 5)
            assert await made.metric("replica_up") == 2
            assert await made.metric("retries_total") == 0
            decode.status = 200
            assert (await made.post()).status == 200

    asyncio.run(case())


def test_a14_a_leg_on_a_lost_replica_is_closed_before_its_retry() -> None:
    async def case() -> None:
        async with bench(decode=2, probe_timeout_s=0.1, probe_failures=2) as made:
            first, second = made.decode
            first.silent, first.health_s = True, 5.0
            open_at_retry: list[int] = []
            whole = second._whole
            second._whole = lambda *args: (open_at_retry.append(first.open), whole(*args))[1]  # type: ignore[method-assign]
            answer = await made.post()
            assert (answer.status, answer.headers["x-headrace-decode"]) == (200, second.name)
            assert open_at_retry == [0]
            assert first.closed_early == 1

    asyncio.run(case())


@pytest.mark.parametrize("stream", [False, True])
def test_the_time_of_a_request_covers_both_legs_and_all_attempts(stream: bool) -> None:
    async def case() -> None:
        async with bench(request_timeout_s=0.6) as made:
            made.prefill[0].latency_s, made.decode[0].silent = 0.35, True
            started = time.monotonic()
            answer = await made.post(stream=stream)
            assert 0.5 < time.monotonic() - started < 0.9
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
        async with bench(probe_timeout_s=0.1, probe_failures=2) as made:
            decode = made.decode[0]
            decode.silent = True
            answer = asyncio.create_task(made.post(stream=stream))
            await until(lambda: decode.open == 1)
            decode.health_s = 5.0
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
            waiting = asyncio.create_task(made.post(session="s"))
            await until(lambda: first.open == 1)
            first.silent, first.status = False, 500
            assert (await made.post(session="s")).headers["x-headrace-decode"] == second.name
            answer = await asyncio.wait_for(waiting, 3)
            assert (answer.status, answer.headers["x-headrace-decode"]) == (200, second.name)

    asyncio.run(case())


def test_a15_a_stream_on_a_lost_replica_goes_on_while_bytes_come_and_ends_when_it_falls_silent() -> None:
    async def case() -> None:
        async with bench(probe_interval_s=0.1, probe_timeout_s=0.4, probe_failures=1) as made:
            decode = made.decode[0]
            decode.tokens, decode.token_s = ["t"] * 8, 0.1
            flowing = asyncio.create_task(made.post(stream=True))
            await until(lambda: len(decode.sent_at) == 1)
            decode.healthy = False
            await until(lambda: not made.router.services.fleet.table.is_usable(decode.name))
            answer = await flowing
            assert [each["choices"][0]["text"] for each in answer.events] == ["t"] * 8

            decode.healthy = True
            await until(lambda: made.router.services.fleet.table.is_usable(decode.name))
            decode.token_s = 60.0
            silent = asyncio.create_task(made.post(stream=True))
            await until(lambda: len(decode.sent_at) == 9)
            decode.healthy = False
            answer = await asyncio.wait_for(silent, 3)
            assert answer.events[-1]["error"]["code"] == 503

    asyncio.run(case())

    asyncio.run(case())


def test_a15_a_busy_replica_survives_slow_probes_and_an_idle_one_does_not() -> None:
    async def case() -> None:
        async with bench(probe_interval_s=0.1, probe_timeout_s=0.2, probe_failures=2) as made:
            decode = made.decode[0]
            decode.tokens, decode.token_s, decode.health_s = ["t"] * 14, 0.1, 5.0
            answer = asyncio.create_task(made.post(stream=True))
            await until(lambda: len(decode.sent_at) == 12)
            assert await made.metric("replica_up", replica=decode.name) == 1
            assert (await answer).status == 200
            fleet = made.router.services.fleet
            await until(lambda: not fleet.table.is_usable(decode.name))
            answer = await made.post()
            assert (answer.status, answer.headers["Retry-After"]) == (503, "1")
            assert "decode" in answer.json["error"]["message"]
            decode.health_s = 0.0
            await until(lambda: fleet.table.is_usable(decode.name))
            assert (await made.post()).status == 200

    asyncio.run(case())


def test_a17_an_error_behind_a_200_is_an_error() -> None:
    async def case() -> None:
        async with bench() as made:
            made.decode[0].finish_reason = "error"
            answer = await made.post()
            assert answer.status == 502
            assert answer.json["error"]["code"] == 502
            assert await made.metric("legs_total", role="decode", outcome="engine_error") == 2
            assert await made.metric("retries_total") == 1

    asyncio.run(case())


def test_a18_ids_are_unique_per_attempt_and_equal_on_both_legs() -> None:
    async def case() -> None:
        async with bench() as made:
            made.decode[0].status, made.decode[0].fail_first = 500, 1
            headers = {"X-Request-Id": "mine"}
            body = json.dumps({"prompt": "hello", "request_id": "mine"}).encode()

            async def send() -> str:
                async with made.client.post(made.url + COMPLETIONS, data=body, headers=headers) as reply:
                    assert reply.status == 200
                    return reply.headers["x-request-id"]

            assert await asyncio.gather(send(), send()) == ["mine", "mine"]
            assert await send() == "mine"
            prefill = [each.request_id for each in made.prefill[0].requests]
            decode = [each.request_id for each in made.decode[0].requests]
            assert len(set(prefill)) == len(prefill) == 4
            assert sorted(prefill) == sorted(decode)
            assert all("request_id" not in each.body for each in made.prefill[0].requests + made.decode[0].requests)
            echoed = await made.post(COMPLETIONS, {"prompt": "hello", "request_id": "in the body"})
            assert echoed.headers["x-request-id"] == "in the body"

    asyncio.run(case())


@pytest.mark.parametrize("stream", [False, True])
def test_a22_a_lost_block_is_retried_with_a_fresh_handoff(stream: bool) -> None:
    async def case() -> None:
        async with bench() as made:
            decode = made.decode[0]
            decode.status, decode.fail_first = 500, 1
            answer = await made.post(stream=stream)
            assert answer.status == 200
            handoffs = [each.body["kv_transfer_params"]["remote_request_id"] for each in decode.requests]
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
            assert (answer.status, answer.headers["x-headrace-decode"]) == (200, "decode-1")
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
        async with bench() as made:
            stub = getattr(made, role)[0]
            port = int(stub.url.rsplit(":", 1)[1])
            await stub.stop()
            answer = await made.post()
            assert (answer.status, answer.headers["Retry-After"]) == (503, "1")
            assert role in answer.json["error"]["message"]
            ready = await made.get("/ready")
            assert (ready.status, role in ready.json["error"]["message"]) == (503, True)
            assert await made.metric("replica_up", role=role) == 0
            await stub.start(port)
            await until(lambda: made.router.services.fleet.table.is_usable(stub.name))
            assert (await made.post()).status == 200

    asyncio.run(case())


@pytest.mark.parametrize("body", [b'{"prompt": "\xff\xfe"}', b'{"prompt": "hel', b"[1]", b"", b"[" * 50_000])
@pytest.mark.parametrize("path", [COMPLETIONS, CHAT, "/finish_session"])
def test_a35_a_body_that_is_not_text_leaves_the_connection_usable(path: str, body: bytes) -> None:
    async def case() -> None:
        async with bench() as made:
            reader, writer = await asyncio.open_connection("127.0.0.1", made.router.port)

            async def send(route: str, content: bytes) -> tuple[int, bytes]:
                writer.write(f"POST {route} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(content)}\r\n\r\n".encode())
                writer.write(content)
                head = await reader.readuntil(b"\r\n\r\n")
                length = next(line for line in head.split(b"\r\n") if line.lower().startswith(b"content-length"))
                return int(head.split()[1]), await reader.readexactly(int(length.split(b":")[1]))

            status, reply = await send(path, body)
            assert status == 400
            assert json.loads(reply)["error"].keys() == {"message", "type", "code", "param"}
            assert made.prefill[0].requests == []
            assert (await send(COMPLETIONS, b'{"prompt": "gr\xc3\xbc\xc3\x9fe"}'))[0] == 200
            assert await made.metric("replica_up") == 2
            writer.close()
            await writer.wait_closed()

    asyncio.run(case())


def test_a37_ids_and_paths_make_no_series() -> None:
    async def case() -> None:
        async with bench() as made:
            await made.post(session="warm")
            await made.finish("warm")
            before = len((await made.get("/metrics")).raw.splitlines())
            for start in range(0, 1000, 50):
                numbers = range(start, start + 50)
                await asyncio.gather(*(made.post(session=f"s{number}", request_id=f"r{number}") for number in numbers))
                await asyncio.gather(*(made.get(f"/jobs/{number}") for number in range(start // 5, start // 5 + 10)))
            text = (await made.get("/metrics")).raw
            assert len(text.splitlines()) - before < 50
            assert b"/jobs/" not in text
            assert await made.metric("requests_total", route="other", code="404") == 200
            assert await made.metric("requests_total", route=COMPLETIONS, code="200") == 1001

    asyncio.run(case())


def test_a39_a_handoff_past_its_lease_is_never_sent() -> None:
    async def case() -> None:
        async with bench(handoff_lease_s=0.6, handoff_margin_s=0.2, connect_timeout_s=0.3) as made:
            made.prefill[0].latency_s = 0.5
            first = asyncio.create_task(made.post())
            await until(lambda: len(made.prefill[0].requests) == 1)
            await asyncio.sleep(0.1)
            made.prefill[0].latency_s = 0.0
            assert (await first).status == 200
            old, fresh = made.prefill[0].requests
            assert made.decode[0].requests[0].body["kv_transfer_params"]["remote_request_id"] == fresh.request_id
            assert old.request_id != fresh.request_id
            assert await made.metric("handoffs_total", outcome="expired") == 1

            # Too slow each time: the decode engine runs the prompt itself, which is right at any age.
            made.prefill[0].latency_s = 0.5
            assert (await made.post()).status == 200
            assert "kv_transfer_params" not in made.decode[0].requests[1].body
            assert await made.metric("handoffs_total", outcome="expired") == 3
            assert len(made.prefill[0].requests) == 4

    asyncio.run(case())


def test_a39_no_handoff_waits_past_its_lease_for_a_connection() -> None:
    async def case() -> None:
        # Connecting may take longer than what the prefill leg leaves of the lease.
        times = {"handoff_lease_s": 0.8, "handoff_margin_s": 0.2, "connect_timeout_s": 0.5}
        async with bench(**times, probe_interval_s=30.0, probe_timeout_s=30.0) as made:
            decode = made.decode[0]
            made.prefill[0].latency_s = 0.3
            port = int(decode.url.rsplit(":", 1)[1])
            await decode.stop()
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


def test_a10_a_live_request_gets_at_most_one_plus_retries_prefill_legs() -> None:
    async def case() -> None:
        async with bench(prefill=4, decode=4, retries=2) as made:
            for stub in made.decode:
                stub.status = 503
            started = time.monotonic()
            answer = await made.post()
            assert (answer.status, answer.json["error"]["code"]) == (503, 503)
            assert sum(len(stub.requests) for stub in made.prefill) == 3
            assert [len(stub.requests) for stub in made.decode].count(1) == 3
            assert time.monotonic() - started < 5
            handoffs = {
                json.dumps(stub.requests[0].body["kv_transfer_params"]) for stub in made.decode if stub.requests
            }
            assert len(handoffs) == 3
            assert HANDOFF["remote_engine_id"] == "engine-7"

    asyncio.run(case())


def test_a_body_that_is_not_compressed_as_it_says_is_the_clients_mistake() -> None:
    async def case() -> None:
        async with bench() as made:
            headers = {"Content-Encoding": "gzip"}
            async with made.client.post(made.url + COMPLETIONS, data=b"abc", headers=headers) as reply:
                assert reply.status == 400
                assert "the body cannot be read" in (await reply.json())["error"]["message"]
            assert made.prefill[0].requests == []

    asyncio.run(case())


def test_a_client_that_leaves_during_a_write_is_no_failure_of_the_router(caplog: pytest.LogCaptureFixture) -> None:
    async def leave(_request: web.Request) -> web.StreamResponse:
        raise aiohttp.ClientConnectionResetError("Cannot write to closing transport")

    response = asyncio.run(json_errors(make_mocked_request("POST", COMPLETIONS), leave))
    assert response.status == CLIENT_GONE
    assert caplog.records == []
