"""One leg over real HTTP and the moment until which it may be sent (field case A39); probes and questions."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, cast

from connectors.vllm_plugin.fence_rules import FenceState
from router.core.commands import SendLeg
from router.core.events import Event, HandoffExpired, LegAnswered, LegFailed
from router.io.exchange import Exchange
from router.io.leg import REPLY_LIMIT, Leg
from router.io.upstream import EngineReply, Upstream
from tests.fakes.stub_engine import StubEngine
from tests.integration.router.harness import COMPLETIONS, TOKEN, deaf_listener, make_settings, until


class Listener:
    """What an exchange is to its legs."""

    def __init__(self) -> None:
        self.events: asyncio.Queue[Event] = asyncio.Queue()

    def leg_over(self, event: Event) -> None:
        self.events.put_nowait(event)


class Sender:
    def __init__(self, upstream: Upstream) -> None:
        self.upstream = upstream
        self.listener = Listener()

    def send(self, url: str, *, send_by: float | None) -> Leg:
        command = SendLeg(
            leg=1,
            role="decode",
            replica="d",
            instance="",
            epoch=1,
            url=url,
            path=COMPLETIONS,
            body=b'{"prompt": "hello"}',
            request_id="r",
            until=time.monotonic() + 60,
            deadline=time.monotonic() + 60,
            send_by=send_by,
        )
        leg = Leg(command, cast(Exchange, self.listener))
        self.upstream.send(leg, b"")
        return leg

    async def outcome(self, url: str, *, send_by: float | None) -> Event:
        self.send(url, send_by=send_by)
        return await asyncio.wait_for(self.listener.events.get(), 5)


@asynccontextmanager
async def sender(**settings: Any) -> AsyncIterator[Sender]:
    async with Upstream(make_settings([], **settings), TOKEN) as upstream:
        yield Sender(upstream)


def test_a39_connecting_ends_when_the_handoff_does_or_when_it_takes_too_long() -> None:
    async def case() -> None:
        with deaf_listener() as port:
            url = f"http://127.0.0.1:{port}"
            async with sender(connect_timeout_s=0.3) as legs:
                started = time.monotonic()
                assert await legs.outcome(url, send_by=started + 0.1) == HandoffExpired(leg=1)
                assert time.monotonic() - started < 0.3
                failed = await legs.outcome(url, send_by=started + 60)
                assert isinstance(failed, LegFailed)
                assert failed.failure == "unreachable"

    asyncio.run(case())


def test_a39_a_stalled_loop_sends_nothing_that_has_expired() -> None:
    async def case() -> None:
        async with StubEngine(name="d").running() as engine, sender() as legs:
            loop = asyncio.get_running_loop()
            for _ in range(5):
                loop.call_soon(loop.call_soon, time.sleep, 0.1)
                assert await legs.outcome(engine.url, send_by=time.monotonic() + 0.05) == HandoffExpired(leg=1)
            assert engine.arrived == 0
            answered = await legs.outcome(engine.url, send_by=time.monotonic() + 5)
            assert isinstance(answered, LegAnswered)

    asyncio.run(case())


def test_a39_nothing_is_sent_too_late_on_a_connection_that_is_there() -> None:
    async def case() -> None:
        async with StubEngine(name="d").running() as engine, sender() as legs:
            assert isinstance(await legs.outcome(engine.url, send_by=None), LegAnswered)
            late = time.monotonic() - 0.001
            assert await legs.outcome(engine.url, send_by=late) == HandoffExpired(leg=1)
            assert engine.arrived == 1
            assert isinstance(await legs.outcome(engine.url, send_by=time.monotonic() + 5), LegAnswered)
            assert engine.reused == 1

    asyncio.run(case())


def test_a_leg_that_is_closed_is_heard_of_no_more() -> None:
    async def case() -> None:
        async with StubEngine(name="d", silent=True).running() as engine, sender() as legs:
            leg = legs.send(engine.url, send_by=None)
            await until(lambda: engine.open == 1)
            assert leg.call is not None
            assert leg.call.sent
            assert legs.upstream.legs() == [leg]
            leg.close()
            await until(lambda: engine.open == 0)
            legs.upstream.forget(leg)
            assert legs.upstream.legs() == []
            assert legs.listener.events.empty()

    asyncio.run(case())


def test_a_reply_without_end_fails_its_leg_before_it_fills_the_memory() -> None:
    async def case() -> None:
        async with StubEngine(name="d", silent=True).running() as engine, sender() as legs:
            leg = legs.send(engine.url, send_by=None)
            await until(lambda: engine.open == 1)
            # Ten times the same bytes take their memory once.
            leg.head(200, {b"content-type": b"application/json"})
            piece = bytes(REPLY_LIMIT // 10)
            for _ in range(11):
                leg.data(piece)
            event = legs.listener.events.get_nowait()
            assert isinstance(event, LegFailed)
            assert event.failure == "broken"
            await until(lambda: engine.open == 0)
            assert legs.listener.events.empty()

    asyncio.run(case())


def test_a_probe_tells_slow_from_refused_and_who_answered() -> None:
    async def case() -> None:
        fence = FenceState(instance="d.a")
        async with StubEngine(name="d", fence=fence, token=TOKEN).running() as engine, sender() as legs:
            reply = await legs.upstream.probe(engine.url, 5)
            assert isinstance(reply, EngineReply)
            assert (reply.status, reply.instance) == (200, "d.a")
            engine.healthy = False
            assert await legs.upstream.probe(engine.url, 5) == "refused"
            engine.health_s = 5.0
            assert await legs.upstream.probe(engine.url, 0.1) == "slow"
            await engine.stop()
            assert await legs.upstream.probe(engine.url, 5) == "refused"

    asyncio.run(case())
