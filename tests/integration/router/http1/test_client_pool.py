"""The client's connections from call to call, against engines that follow a script."""

from __future__ import annotations

import asyncio
import socket
import time

import pytest

from tests.integration.router.harness import deaf_listener, until
from tests.integration.router.http1.harness import (
    HEAD,
    REPLY,
    EngineSide,
    Listener,
    Run,
    ask,
    both_loops,
    engine,
    http_client,
    serving,
)


@both_loops
def test_a_call_per_connection_and_the_last_used_connection_first(run: Run) -> None:
    async def script(at: EngineSide, number: int) -> None:
        while True:
            await at.request()
            await at.say(b"HTTP/1.1 200 OK\r\nContent-Length: 1\r\n\r\n%d" % number)

    async def case() -> None:
        async with engine(script) as there, http_client() as client:
            together = [Listener() for _ in range(3)]
            for each in together:
                client.send(there.url, "POST", HEAD, b"", each)
            for each in together:
                await each.over()
            assert sorted(each.body for each in together) == [b"0", b"1", b"2"]
            first = await ask(client, there)
            assert [(await ask(client, there)).body for _ in range(3)] == [first.body] * 3

    run(case())


@both_loops
def test_the_next_call_may_be_sent_when_the_reply_ends(run: Run) -> None:
    async def case() -> None:
        async with engine(serving) as there, http_client() as client:
            second = Listener()

            class First(Listener):
                def ended(self) -> None:
                    super().ended()
                    client.send(there.url, "POST", HEAD, b"", second)

            client.send(there.url, "POST", HEAD, b"", First())
            await second.over()
            assert (second.body, there.connections) == (b"ok", 1)

    run(case())


@both_loops
@pytest.mark.parametrize("after", ["close", "reset"])
def test_a16_a_reused_connection_that_was_closed_is_retried_once_on_a_fresh_one(run: Run, after: str) -> None:
    async def script(at: EngineSide, number: int) -> None:
        await at.request()
        await at.say(REPLY)
        if number < 2:
            # Dies with the second request in hand, as if it had been idle for too long.
            await at.request()
            if after == "reset":
                at.reset()
        else:
            await serving(at, number)

    async def case() -> None:
        async with engine(script) as there, http_client() as client:
            # Two idle connections, of which both are about to die: only a fresh one helps.
            both = [Listener(), Listener()]
            for each in both:
                client.send(there.url, "POST", HEAD, b"", each)
            for each in both:
                await each.over()
            third = await ask(client, there)
            assert (third.failure, third.body, there.connections) == (None, b"ok", 3)

    run(case())


@both_loops
def test_a16_the_retry_happens_once_and_not_after_the_first_byte(run: Run) -> None:
    async def dying(at: EngineSide, number: int) -> None:
        if number == 0:
            await at.request()
            await at.say(REPLY)
        await at.request()

    async def mumbling(at: EngineSide, _number: int) -> None:
        await at.request()
        await at.say(REPLY)
        await at.request()
        await at.say(b"H")

    async def case() -> None:
        for script, connections in ((dying, 2), (mumbling, 1)):
            async with engine(script) as there, http_client() as client:
                assert (await ask(client, there)).body == b"ok"
                assert (await ask(client, there)).failure == "broken"
                assert there.connections == connections

    run(case())


@both_loops
def test_a16_the_retry_keeps_to_the_moment_until_which_it_may_be_sent(run: Run) -> None:
    requests: list[bytes] = []

    async def script(at: EngineSide, _number: int) -> None:
        requests.append(await at.request())
        await at.say(REPLY)
        requests.append(await at.request())
        await asyncio.sleep(0.3)

    async def case() -> None:
        async with engine(script) as there, http_client() as client:
            await ask(client, there)
            listener = Listener()
            client.send(there.url, "POST", HEAD, b"", listener, send_by=time.monotonic() + 0.1)
            assert (await listener.over()).failure == "late"
            assert len(requests) == 2

    run(case())


@both_loops
@pytest.mark.parametrize(
    "reply",
    [
        b"HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: 2\r\n\r\nok",
        b"HTTP/1.0 200 OK\r\nContent-Length: 2\r\n\r\nok",
        REPLY + REPLY,
        REPLY + b"HTTP/1.1 400 Bad",
    ],
)
def test_a_connection_that_may_not_be_used_again_is_closed(run: Run, reply: bytes) -> None:
    async def script(at: EngineSide, _number: int) -> None:
        await at.request()
        await at.say(reply)
        await at.gone()

    async def case() -> None:
        async with engine(script) as there, http_client() as client:
            for number in range(3):
                listener = await ask(client, there)
                assert (listener.failure, listener.body, there.connections) == (None, b"ok", number + 1)

    run(case())


@both_loops
def test_an_idle_connection_that_speaks_or_closes_is_dropped(run: Run) -> None:
    gone = 0

    async def script(at: EngineSide, number: int) -> None:
        nonlocal gone
        await at.request()
        await at.say(REPLY)
        if number == 0:
            await asyncio.sleep(0.05)
            await at.say(b"HTTP/1.1 408 Request Timeout\r\nContent-Length: 0\r\n\r\n")
            await at.gone()
        gone += 1

    async def case() -> None:
        async with engine(script) as there, http_client() as client:
            for number in range(3):
                assert (await ask(client, there)).body == b"ok"
                await until(lambda expected=number + 1: gone == expected)  # type: ignore[misc]
                await asyncio.sleep(0.05)
                assert there.connections == number + 1

    run(case())


@both_loops
def test_connections_are_not_used_beyond_their_time(run: Run) -> None:
    gone = asyncio.Event()

    async def script(at: EngineSide, _number: int) -> None:
        await at.request()
        await at.say(REPLY)
        await at.gone()
        gone.set()

    async def case() -> None:
        async with engine(script) as there, http_client(keepalive_s=0.1) as client:
            await ask(client, there)
            await asyncio.sleep(0.2)
            await ask(client, there)
            assert there.connections == 2
            # The other one is swept up without a call that looks for it.
            gone.clear()
            async with asyncio.timeout(10):
                await gone.wait()

    run(case())


@both_loops
@pytest.mark.parametrize("where", ["head", "data", "ended", "failed"])
def test_a_listener_that_fails_does_no_harm(run: Run, where: str, caplog: pytest.LogCaptureFixture) -> None:
    async def script(at: EngineSide, number: int) -> None:
        await at.request()
        if where == "failed" and number == 0:
            return
        await at.say(REPLY)
        await serving(at, number)

    class Failing(Listener):
        def head(self, status: int, headers: dict[bytes, bytes]) -> None:
            self.reach("head")

        def data(self, chunk: bytes) -> None:
            self.reach("data")

        def ended(self) -> None:
            self.reach("ended")

        def failed(self, *_: object) -> None:
            self.reach("failed")

        def reach(self, place: str) -> None:
            if place == where:
                self.has_data.set()
                raise ValueError("a bug")

    async def case() -> None:
        async with engine(script) as there, http_client() as client:
            listener = Failing()
            call = client.send(there.url, "POST", HEAD, b"", listener)
            await listener.has_data.wait()
            for _ in range(3):
                assert (await ask(client, there)).body == b"ok"
            call.close()
            assert (await ask(client, there)).body == b"ok"

    run(case())
    assert len([each for each in caplog.records if each.name.startswith("router.")]) == 1


@both_loops
def test_calls_that_are_open_when_the_client_closes_fail(run: Run) -> None:
    async def script(at: EngineSide, number: int) -> None:
        await at.request()
        if number == 0:
            await at.say(REPLY)
        await at.gone()

    async def case() -> None:
        with deaf_listener() as port:
            async with engine(script) as there, http_client() as client:
                await ask(client, there)
                reused, fresh, opening = Listener(), Listener(), Listener()
                client.send(there.url, "POST", HEAD, b"", reused)
                client.send(there.url, "POST", HEAD, b"", fresh)
                client.send(f"http://127.0.0.1:{port}/", "POST", HEAD, b"", opening)
                await until(lambda: there.connections == 2)
                await client.close()
                assert [each.failure for each in (reused, fresh, opening)] == ["broken"] * 3

    run(case())


@both_loops
def test_small_writes_are_not_delayed_by_the_kernel(run: Run) -> None:
    async def case() -> None:
        async with engine(serving) as there, http_client() as client:
            await ask(client, there)
            connection = client.take_idle(("127.0.0.1", there.port))
            assert connection is not None
            made = connection.transport.get_extra_info("socket")
            assert made.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
            assert made.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
            client.released(connection)

    run(case())
