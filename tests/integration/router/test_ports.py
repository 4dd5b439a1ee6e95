"""The routes that need no engine, the internal port, and the process itself."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import sys
import time
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from router.settings import EngineEndpoint
from tests.fakes.stub_engine import HANDOFF, StubEngine
from tests.integration.router.harness import COMPLETIONS, TOKEN, bench, make_settings, until


def test_the_gate_rules_what_is_sent() -> None:
    async def case() -> None:
        async with bench(gate="frozen") as made:
            for state in ("frozen", "holding"):
                await made.set_gate(state)
                answer = await made.post()
                assert (answer.status, answer.headers["Retry-After"]) == (503, "1")
                assert state in answer.json["error"]["message"]
                assert (await made.get("/ready")).status == 503
                assert await made.metric("gate", state=state) == 1
                assert await made.metric("gate") == 1
            assert (await made.get("/health")).status == 200
            assert made.prefill[0].requests == []
            await made.set_gate("open")
            assert (await made.get("/ready")).status == 200
            assert (await made.post()).status == 200

    asyncio.run(case())


@pytest.mark.parametrize(("state", "status", "legs"), [("holding", 200, 1), ("frozen", 503, 0)])
def test_a_closed_gate_meets_a_request_between_its_legs(state: str, status: int, legs: int) -> None:
    async def case() -> None:
        async with bench() as made:
            made.prefill[0].latency_s = 0.3
            running = asyncio.create_task(made.post())
            await until(lambda: made.prefill[0].open == 1)
            await made.set_gate(state)
            assert (await running).status == status
            assert len(made.decode[0].requests) == legs
            assert await made.metric("handoffs_total", outcome="unused") == 1 - legs

    asyncio.run(case())


def test_the_public_routes() -> None:
    async def case() -> None:
        async with bench(max_body_bytes=2000) as made:
            models = await made.get("/v1/models")
            assert (models.status, models.json["data"][0]["id"]) == (200, "stub")
            for answer in (await made.get("/nowhere"), await made.get(COMPLETIONS), await made.post("/state")):
                assert (answer.status, answer.json["error"]["code"]) == (404, 404)
            large = await made.post(prompt="x" * 3000)
            assert (large.status, large.json["error"]["code"]) == (413, 413)
            assert (await made.post()).headers["x-request-id"].startswith("hr-")

    asyncio.run(case())


def test_the_internal_port_asks_for_the_token() -> None:
    async def case() -> None:
        async with bench() as made:
            await made.post(session="s")
            for headers in ({}, {"Authorization": "Bearer other"}):
                async with made.client.get(made.admin_url + "/state", headers=headers) as reply:
                    assert reply.status == 401
                async with made.client.post(
                    made.admin_url + "/gate", json={"gate": "frozen"}, headers=headers
                ) as reply:
                    assert reply.status == 401
            headers = {"Authorization": f"Bearer {TOKEN}"}
            async with made.client.get(made.admin_url + "/state", headers=headers) as reply:
                state = await reply.json()
            assert (state["gate"], state["sessions"]) == ("open", 1)
            assert state["replicas"][1] == {
                "name": "decode-0",
                "role": "decode",
                "url": made.decode[0].url,
                "usable": True,
                "active_sessions": 1,
                "legs_in_flight": 0,
                "tokens_in_flight": 0,
            }
            for body in (b'{"gate": "ajar"}', b"{", b'{"gate": "open", "x": 1}'):
                async with made.client.post(made.admin_url + "/gate", data=body, headers=headers) as reply:
                    assert (reply.status, (await reply.json())["error"]["param"]) == (400, "gate")

    asyncio.run(case())


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


async def _start_process(config: Path, token_file: Path) -> asyncio.subprocess.Process:
    return await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "router.main",
        "--config",
        str(config),
        env={**os.environ, "HEADRACE_TOKEN_FILE": str(token_file)},
        stderr=asyncio.subprocess.PIPE,
    )


def test_the_process_serves_drains_on_sigterm_and_exits_with_0(tmp_path: Path) -> None:
    async def case() -> None:
        prefill, decode = StubEngine(name="p", handoff=HANDOFF), StubEngine(name="d", latency_s=0.6)
        async with prefill.running(), decode.running(), aiohttp.ClientSession() as client:
            engines = [
                EngineEndpoint(name="p", role="prefill", url=prefill.url),
                EngineEndpoint(name="d", role="decode", url=decode.url),
            ]
            ports = {"port": _free_port(), "internal_port": _free_port(), "shutdown_grace_s": 5.0}
            settings = make_settings(engines, **ports)
            (tmp_path / "router.json").write_text(settings.model_dump_json())
            (tmp_path / "token").write_text(TOKEN + "\n")
            process = await _start_process(tmp_path / "router.json", tmp_path / "token")
            url, admin = (f"http://127.0.0.1:{ports[name]}" for name in ("port", "internal_port"))
            await _until_up(client, url + "/health")
            async with client.post(
                admin + "/gate", json={"gate": "open"}, headers={"Authorization": f"Bearer {TOKEN}"}
            ) as reply:
                assert reply.status == 200
            await _until_up(client, url + "/ready")

            async def send() -> tuple[int, Any]:
                async with client.post(url + COMPLETIONS, json={"prompt": "hello"}) as reply:
                    return reply.status, await reply.json()

            running = asyncio.create_task(send())
            await until(lambda: decode.open == 1)
            process.send_signal(signal.SIGTERM)
            status, body = await running
            assert (status, body["choices"][0]["text"]) == (200, "abcd")
            assert await process.wait() == 0
            assert process.stderr is not None
            assert b"Traceback" not in await process.stderr.read()

    asyncio.run(case())


def test_draining_ends_within_its_grace_while_a_stream_goes_on() -> None:
    async def case() -> None:
        async with AsyncExitStack() as stack:
            made = await stack.enter_async_context(bench(shutdown_grace_s=1.0))
            made.decode[0].token_s = 30.0
            _, writer = await asyncio.open_connection("127.0.0.1", made.router.port)
            body = b'{"prompt": "hello", "stream": true}'
            head = f"POST {COMPLETIONS} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
            writer.write(head.encode() + body)
            await until(lambda: made.decode[0].open == 1)
            started = time.monotonic()
            await stack.aclose()
            assert 0.8 < time.monotonic() - started < 1.8
            writer.close()

    asyncio.run(case())


async def _until_up(client: aiohttp.ClientSession, url: str) -> None:
    for _ in range(300):
        try:
            async with client.get(url) as reply:
                if reply.status == 200:
                    return
        except aiohttp.ClientConnectorError:
            pass
        await asyncio.sleep(0.05)
    raise AssertionError(f"{url} did not come up")


def test_the_process_refuses_settings_that_can_not_work(tmp_path: Path) -> None:
    async def case() -> None:
        settings = make_settings([]).model_dump(mode="json")
        (tmp_path / "router.json").write_text(json.dumps(settings | {"handoff_lease_s": 1.0}))
        (tmp_path / "token").write_text(TOKEN)
        process = await _start_process(tmp_path / "router.json", tmp_path / "token")
        assert process.stderr is not None
        message = await process.stderr.read()
        assert await process.wait() == 2
        assert b"handoff_margin_s (2.0) must be below handoff_lease_s (1.0)" in message

    asyncio.run(case())
