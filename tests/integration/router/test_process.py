"""The router as a process: how it starts, drains and ends."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import sys
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from router.main import main
from router.settings import TOKEN_FILE_VARIABLE, EngineEndpoint, RouterSettings
from tests.fakes.stub_engine import HANDOFF, StubEngine
from tests.integration.router.harness import COMPLETIONS, TOKEN, LeavingClient, bench, make_settings, until


@dataclass
class Process:
    """A router process, its engines and a client."""

    process: asyncio.subprocess.Process
    url: str
    prefill: StubEngine
    decode: StubEngine
    client: aiohttp.ClientSession

    async def send(self, **fields: Any) -> tuple[int, bytes]:
        async with self.client.post(self.url + COMPLETIONS, json={"prompt": "hello", **fields}) as reply:
            return reply.status, await reply.read()

    async def ended(self) -> tuple[int, str]:
        """Exit status and log."""
        assert self.process.stderr is not None
        log = await self.process.stderr.read()
        return await self.process.wait(), log.decode()


@asynccontextmanager
async def process(folder: Path, **changes: Any) -> AsyncIterator[Process]:
    """Serving, with an open gate."""
    async with AsyncExitStack() as stack:
        prefill, decode = StubEngine(name="p", handoff=HANDOFF), StubEngine(name="d")
        for stub in (prefill, decode):
            await stack.enter_async_context(stub.running())
        client = await stack.enter_async_context(aiohttp.ClientSession())
        engines = [
            EngineEndpoint(name="p", role="prefill", url=prefill.url),
            EngineEndpoint(name="d", role="decode", url=decode.url),
        ]
        ports = {"port": _free_port(), "internal_port": _free_port(), "shutdown_grace_s": 5.0}
        started = await _start(folder, make_settings(engines, **{**ports, **changes}))
        try:
            url, admin = (f"http://127.0.0.1:{ports[name]}" for name in ("port", "internal_port"))
            await _until_up(client, url + "/health")
            for path, body in (("/epochs", {"epoch": 1, "version": "v1"}), ("/gate", {"gate": "open"})):
                async with client.post(admin + path, json=body, headers={"Authorization": f"Bearer {TOKEN}"}) as reply:
                    assert reply.status == 200
            await _until_up(client, url + "/ready")
            yield Process(started, url, prefill, decode, client)
        finally:
            if started.returncode is None:
                started.kill()
                await started.wait()


def _written(folder: Path, settings: dict[str, Any]) -> Path:
    """The settings as a file, a token file beside it."""
    (folder / "token").write_text(TOKEN + "\n")
    config = folder / "router.json"
    config.write_text(json.dumps(settings))
    return config


async def _start(folder: Path, settings: RouterSettings) -> asyncio.subprocess.Process:
    config = _written(folder, settings.model_dump(mode="json"))
    return await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "router.main",
        "--config",
        str(config),
        env={**os.environ, TOKEN_FILE_VARIABLE: str(folder / "token")},
        stderr=asyncio.subprocess.PIPE,
    )


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


async def _until_up(client: aiohttp.ClientSession, url: str) -> None:
    async with asyncio.timeout(20):
        while True:
            try:
                async with client.get(url) as reply:
                    if reply.status == 200:
                        return
            except aiohttp.ClientConnectorError:
                pass
            await asyncio.sleep(0.05)


@pytest.mark.parametrize("stream", [False, True])
def test_sigterm_lets_open_requests_finish_and_ends_with_0(tmp_path: Path, stream: bool) -> None:
    async def case() -> None:
        async with process(tmp_path) as router:
            router.decode.answers.clear()
            running = asyncio.create_task(router.send(stream=stream))
            await until(lambda: router.decode.open == 1)
            router.process.send_signal(signal.SIGTERM)
            await _until_refused(router.url)
            router.decode.answers.set()
            status, body = await running
            assert status == 200
            assert body.endswith(b"data: [DONE]\n\n") if stream else json.loads(body)["choices"][0]["text"] == "abcd"
            status, log = await router.ended()
            assert status == 0
            assert "Traceback" not in log

    asyncio.run(case())


async def _until_refused(url: str) -> None:
    """New connections are not taken any more."""
    port = int(url.rsplit(":", 1)[1])
    async with asyncio.timeout(5):
        while True:
            try:
                _, writer = await asyncio.open_connection("127.0.0.1", port)
            except ConnectionRefusedError:
                return
            writer.close()
            await asyncio.sleep(0.02)


@pytest.mark.parametrize("workers", [1, 2])
def test_requests_that_outlast_the_grace_are_told_to_come_again(tmp_path: Path, workers: int) -> None:
    async def case() -> None:
        async with process(tmp_path, max_requests=1, shutdown_grace_s=0.5, workers=workers) as router:
            router.decode.silent = True
            both = [asyncio.create_task(router.send()) for _ in range(2)]
            await until(lambda: router.decode.open == 1)
            router.process.send_signal(signal.SIGTERM)
            for each in both:
                status, body = await each
                assert (status, "shutting down" in json.loads(body)["error"]["message"]) == (503, True)
            status, log = await router.ended()
            assert status == 0
            assert "Traceback" not in log
            await until(lambda: router.decode.open == 0)

    asyncio.run(case())


def test_a_stream_that_ends_while_draining_takes_its_connection_with_it() -> None:
    async def case() -> None:
        async with AsyncExitStack() as stack:
            made = await stack.enter_async_context(bench(shutdown_grace_s=50.0))
            made.decode[0].token_s = 0.2
            client = await LeavingClient.sending(made, stream=True)
            await client.reader.readuntil(b"data:")
            async with asyncio.timeout(20):
                await stack.aclose()
            assert (await client.reader.read()).endswith(b"0\r\n\r\n")
            await client.leave()

    asyncio.run(case())


def test_draining_ends_within_its_grace_while_a_stream_goes_on() -> None:
    async def case() -> None:
        async with AsyncExitStack() as stack:
            made = await stack.enter_async_context(bench(shutdown_grace_s=1.0))
            made.decode[0].token_s = 30.0
            client = await LeavingClient.sending(made, stream=True)
            await until(lambda: made.decode[0].open == 1)
            started = time.monotonic()
            await stack.aclose()
            assert 0.8 < time.monotonic() - started < 5
            assert b'"code":503' in (await client.reader.read())
            await client.leave()

    asyncio.run(case())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"handoff_lease_s": 1.0}, "handoff_margin_s (2.0) must be below handoff_lease_s (1.0)"),
        ({"handoff_lease_s": 0}, "handoff_lease_s"),
        (
            {"request_timeout_s": 0, "retry": 1},
            "request_timeout_s: Input should be greater than 0; retry: Extra inputs",
        ),
        ({"session_journal": "/nowhere/journal"}, "session_journal /nowhere/journal: No such file or directory"),
        # Field case A16: the engine would close connections that the router still uses.
        ({"keepalive_s": 5.0, "engine_keepalive_s": 5.0}, "keepalive_s (5.0) must be below engine_keepalive_s (5.0)"),
    ],
)
def test_settings_that_can_not_work_are_refused(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    changes: dict[str, Any],
    message: str,
) -> None:
    config = _written(tmp_path, {**make_settings([]).model_dump(mode="json"), **changes})
    monkeypatch.setenv(TOKEN_FILE_VARIABLE, str(tmp_path / "token"))
    assert main(["--config", str(config)]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("port", ["port", "internal_port"])
def test_a_port_that_is_taken_ends_with_1(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], port: str
) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        config = _written(tmp_path, make_settings([], **{port: taken.getsockname()[1]}).model_dump(mode="json"))
        monkeypatch.setenv(TOKEN_FILE_VARIABLE, str(tmp_path / "token"))
        assert main(["--config", str(config)]) == 1
    assert "can't listen" in capsys.readouterr().err
