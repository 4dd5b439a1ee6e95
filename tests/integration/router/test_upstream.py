"""One leg over real HTTP, and the moment until which it may be sent (field case A39)."""

from __future__ import annotations

import asyncio
import time

import aiohttp
import pytest

from router.core.commands import SendLeg
from router.core.events import HandoffExpired, LegAnswered, LegFailed
from router.io.upstream import Leg, Upstream
from tests.fakes.stub_engine import StubEngine
from tests.integration.router.harness import COMPLETIONS, deaf_listener, make_settings


def leg(url: str, *, send_by: float | None, timeout_s: float = 5.0) -> SendLeg:
    return SendLeg(
        leg=1,
        role="decode",
        replica="d",
        url=url + COMPLETIONS,
        body=b'{"prompt": "hello"}',
        request_id="r",
        timeout_s=timeout_s,
        send_by=send_by,
    )


def test_a39_connecting_ends_when_the_handoff_does_or_when_it_takes_too_long() -> None:
    async def case() -> None:
        with deaf_listener() as port:
            url = f"http://127.0.0.1:{port}"
            async with Upstream(make_settings([], connect_timeout_s=0.3)) as upstream:
                started = time.monotonic()
                assert await upstream.leg(leg(url, send_by=started + 0.1)).start({}) == HandoffExpired(leg=1)
                assert time.monotonic() - started < 0.3
                failed = await upstream.leg(leg(url, send_by=started + 60)).start({})
                assert isinstance(failed, LegFailed)
                assert failed.failure == "unreachable"

    asyncio.run(case())


def test_a39_a_stalled_loop_sends_nothing_that_has_expired() -> None:
    async def case() -> None:
        async with StubEngine(name="d").running() as engine, Upstream(make_settings([])) as upstream:
            loop = asyncio.get_running_loop()
            for _ in range(5):
                loop.call_soon(loop.call_soon, time.sleep, 0.1)
                expired = await upstream.leg(leg(engine.url, send_by=time.monotonic() + 0.05)).start({})
                assert expired == HandoffExpired(leg=1)
            late = time.monotonic() - 0.001
            assert await upstream.leg(leg(engine.url, send_by=late)).start({}) == HandoffExpired(leg=1)
            assert engine.requests == []
            answered = await upstream.leg(leg(engine.url, send_by=time.monotonic() + 5)).start({})
            assert isinstance(answered, LegAnswered)

    asyncio.run(case())


def test_a39_a_connection_that_comes_too_late_carries_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    quick = Leg._timeout

    def slow(self: Leg, left_s: float | None) -> aiohttp.ClientTimeout:
        time.sleep(0.05)
        return quick(self, left_s)

    async def case() -> None:
        async with StubEngine(name="d").running() as engine, Upstream(make_settings([])) as upstream:
            assert isinstance(await upstream.leg(leg(engine.url, send_by=None)).start({}), LegAnswered)
            # A connection of the pool needs no waiting: only the look at the clock before the first byte is left.
            monkeypatch.setattr(Leg, "_timeout", slow)
            expired = await upstream.leg(leg(engine.url, send_by=time.monotonic() + 0.03)).start({})
            assert expired == HandoffExpired(leg=1)
            assert len(engine.requests) == 1

    asyncio.run(case())
