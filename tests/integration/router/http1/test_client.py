"""Calls of the client, against engines that follow a script."""

from __future__ import annotations

import asyncio
import errno
import os
import socket
import time
from typing import Any

import pytest

from router.io.http1.client import Failure, HttpClient, split_url
from tests.integration.router.harness import deaf_listener, until
from tests.integration.router.http1.harness import (
    HEAD,
    REPLY,
    Engine,
    EngineSide,
    Listener,
    Run,
    ask,
    both_loops,
    engine,
    http_client,
    serving,
)

STREAM = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"


@both_loops
def test_a_request_and_its_reply(run: Run) -> None:
    seen: list[bytes] = []

    async def script(at: EngineSide, _number: int) -> None:
        while True:
            seen.append(await at.request())
            await at.say(b"HTTP/1.1 201 Created\r\nX-A: b\r\nContent-Length: 4\r\n\r\nbo")
            await at.say(b"dy")

    async def case() -> None:
        async with engine(script) as there, http_client() as client:
            for method, body in (("POST", b"{}"), ("POST", b"x" * 300_000), ("GET", b"")):
                listener = Listener()
                call = client.send(there.url, method, HEAD, body, listener)
                assert listener.status == 0
                await listener.over()
                assert (listener.status, listener.headers[b"x-a"], listener.body) == (201, b"b", b"body")
                assert call.sent
            assert there.connections == 1
            start, host = b" /v1/completions HTTP/1.1\r\n", b"Host: 127.0.0.1:%d\r\n" % there.port
            assert seen[0] == b"POST" + start + host + b"Content-Length: 2\r\n" + HEAD + b"\r\n{}"
            assert seen[1].endswith(b"\r\n\r\n" + b"x" * 300_000)
            assert seen[2] == b"GET" + start + host + HEAD + b"\r\n"

    run(case())


@both_loops
@pytest.mark.parametrize(
    "reply",
    [
        b"",
        b"HTTP/1.1 200 OK\r\nContent-Le",
        b"HTTP/1.1 200 OK\r\nContent-Length: 3\r\n\r\nok",
        STREAM + b"2\r\nok\r\n",
        b"HTTP/1.1 100 Continue\r\n\r\n",
        b"SSH-2.0-OpenSSH\r\n",
        STREAM + b"no number\r\n",
    ],
)
def test_a_reply_that_is_cut_off_or_malformed_is_broken(run: Run, reply: bytes) -> None:
    async def script(at: EngineSide, _number: int) -> None:
        await at.request()
        await at.say(reply)

    async def case() -> None:
        async with engine(script) as there, http_client() as client:
            assert (await ask(client, there)).failure == "broken"
            assert there.connections == 1

    run(case())


@both_loops
def test_a_reply_without_a_length_ends_with_its_connection(run: Run) -> None:
    async def script(at: EngineSide, number: int) -> None:
        await at.request()
        await at.say(b"HTTP/1.1 200 OK\r\n\r\nall ")
        await at.say(b"of it")
        if number:
            at.reset()

    async def case() -> None:
        async with engine(script) as there, http_client() as client:
            whole = await ask(client, there)
            assert (whole.failure, whole.body) == (None, b"all of it")
            assert (await ask(client, there)).failure == "broken"

    run(case())


@both_loops
def test_nothing_is_sent_that_is_late(run: Run) -> None:
    requests: list[bytes] = []

    async def script(at: EngineSide, _number: int) -> None:
        while True:
            requests.append(await at.request())
            await at.say(REPLY)

    async def late(client: HttpClient, there: Engine, left_s: float) -> Listener:
        listener = Listener()
        client.send(there.url, "POST", HEAD, b"", listener, send_by=time.monotonic() + left_s)
        assert listener.outcomes == 0, "told before send has returned"
        return await listener.over()

    async def case() -> None:
        async with engine(script) as there, http_client() as client:
            # No connection yet, and a loop that stalls while one is opened.
            asyncio.get_running_loop().call_soon(time.sleep, 0.1)
            assert (await late(client, there, 0.05)).failure == "late"
            assert (await late(client, there, -0.001)).failure == "late"
            assert (await late(client, there, 60.0)).body == b"ok"
            # With a connection in hand.
            assert (await late(client, there, -0.001)).failure == "late"
            assert (await late(client, there, 60.0)).body == b"ok"
            assert len(requests) == 2

    run(case())


@both_loops
def test_connecting_ends_with_the_shorter_of_two_limits(run: Run) -> None:
    async def case() -> None:
        with deaf_listener() as port:
            async with http_client(connect_timeout_s=0.1) as client:
                for left_s, failure in ((0.05, "late"), (60.0, "unreachable"), (None, "unreachable")):
                    listener = Listener()
                    send_by = None if left_s is None else time.monotonic() + left_s
                    call = client.send(f"http://127.0.0.1:{port}/", "POST", HEAD, b"", listener, send_by=send_by)
                    assert (await listener.over()).failure == failure
                    assert not call.sent

    run(case())


@both_loops
def test_an_engine_that_is_not_there_is_unreachable(run: Run) -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        port = unused.getsockname()[1]

        async def case() -> None:
            async with http_client() as client:
                for host in ("127.0.0.1", "localhost", "does-not-exist.invalid"):
                    listener = Listener()
                    client.send(f"http://{host}:{port}/", "POST", HEAD, b"", listener)
                    assert (await listener.over()).failure == "unreachable"

        run(case())


@both_loops
@pytest.mark.parametrize(
    ("codes", "failure"),
    [
        ([errno.EMFILE], "local"),
        ([errno.ENOBUFS, errno.EADDRNOTAVAIL], "local"),
        ([errno.ECONNREFUSED, errno.EADDRNOTAVAIL], "unreachable"),
        ([errno.EADDRNOTAVAIL, errno.EHOSTUNREACH], "unreachable"),
    ],
)
def test_what_this_machine_lacks_is_not_the_engines_failure(
    run: Run, codes: list[int], failure: Failure, monkeypatch: pytest.MonkeyPatch
) -> None:
    left = iter(codes)

    def no_socket(_address: Any) -> socket.socket:
        code = next(left)
        raise OSError(code, os.strerror(code))

    async def case() -> None:
        address = (socket.AF_INET, socket.SOCK_STREAM, 0, "", ("127.0.0.1", 9))
        with monkeypatch.context() as patch:
            patch.setattr(socket, "getaddrinfo", lambda *_, **__: [address] * len(codes))
            async with http_client(no_socket) as client:
                listener = Listener()
                client.send("http://engine:9/", "POST", HEAD, b"", listener)
                assert (await listener.over()).failure == failure
        assert list(left) == []

    run(case())


@both_loops
def test_a_mistake_while_connecting_ends_the_call(run: Run, caplog: pytest.LogCaptureFixture) -> None:
    def broken(_address: Any) -> socket.socket:
        raise TypeError("a mistake")

    async def case() -> None:
        async with http_client(broken) as client:
            listener = Listener()
            client.send("http://127.0.0.1:9/", "POST", HEAD, b"", listener)
            assert (await listener.over()).failure == "unreachable"

    run(case())
    assert [record.message for record in caplog.records] == ["connecting to 127.0.0.1 port 9 failed"]


@both_loops
def test_names_and_ipv6_addresses(run: Run) -> None:
    async def case() -> None:
        async with engine(serving) as there, http_client() as client:
            listener = Listener()
            client.send(there.url.replace("127.0.0.1", "localhost"), "POST", HEAD, b"", listener)
            assert (await listener.over()).body == b"ok"
        made = Engine(serving)
        try:
            listening = await asyncio.start_server(made.accept, "::1", 0)
        except OSError:
            pytest.skip("no IPv6 here")
        async with http_client() as client:
            listener = Listener()
            client.send(f"http://[::1]:{listening.sockets[0].getsockname()[1]}/", "POST", HEAD, b"", listener)
            assert (await listener.over()).body == b"ok"
            listening.close()
            await made.stop()

    run(case())


@both_loops
def test_closing_a_call_closes_its_connection_and_tells_nothing(run: Run) -> None:
    gone = 0

    async def script(at: EngineSide, number: int) -> None:
        nonlocal gone
        await at.request()
        if number:
            await at.say(STREAM + b"2\r\nok\r\n")
        await at.gone()
        gone += 1

    async def case() -> None:
        async with engine(script) as there, http_client() as client:
            silent, streaming, opening = Listener(), Listener(), Listener()
            first = client.send(there.url, "POST", HEAD, b"", silent)
            await until(lambda: there.connections == 1)
            second = client.send(there.url, "POST", HEAD, b"", streaming)
            await streaming.has_data.wait()
            first.close()
            second.close()
            second.close()
            client.send(there.url, "POST", HEAD, b"", opening).close()
            await until(lambda: gone == 2)
            assert silent.outcomes == streaming.outcomes == opening.outcomes == 0

    run(case())


@both_loops
def test_a_paused_call_reads_nothing_more(run: Run) -> None:
    sent = 0
    total = 64 * 1024 * 1024

    async def script(at: EngineSide, _number: int) -> None:
        nonlocal sent
        await at.request()
        await at.say(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % total)
        while sent < total:
            await at.say(b"x" * 65536)
            sent += 65536
        await serving(at, 0)

    async def case() -> None:
        async with engine(script) as there, http_client() as client:

            class Pausing(Listener):
                received = 0

                def data(self, chunk: bytes) -> None:
                    self.received += len(chunk)
                    self.has_data.set()
                    call.pause()

            listener = Pausing()
            call = client.send(there.url, "POST", HEAD, b"", listener)
            await listener.has_data.wait()
            known = -1
            while known != sent:
                known = sent
                await asyncio.sleep(0.1)
            assert listener.received < 1_000_000
            assert sent < total
            while not listener.outcomes:
                call.resume()
                await asyncio.sleep(0)
            assert listener.received == total
            # The connection reads again for whoever uses it next.
            assert (await ask(client, there)).body == b"ok"
            assert there.connections == 1

    run(case())


@both_loops
def test_a_request_is_sent_once_the_kernel_has_all_of_it(run: Run) -> None:
    may_read = asyncio.Event()

    async def script(at: EngineSide, _number: int) -> None:
        await may_read.wait()
        await serving(at, 0)

    async def case() -> None:
        async with engine(script) as there, http_client() as client:
            listener = Listener()
            call = client.send(there.url, "POST", HEAD, b"x" * 30_000_000, listener)
            assert not call.sent
            await until(lambda: there.connections == 1)
            await asyncio.sleep(0.1)
            assert not call.sent
            may_read.set()
            await listener.over()
            assert call.sent

    run(case())


@pytest.mark.parametrize(
    "url",
    ["https://h/", "h:80/x", "http://user@h/", "http:///x", "http://h/a b", "http://h/\r\nX: y", "http://h:99999/"],
)
def test_what_is_no_url_of_an_engine(url: str) -> None:
    with pytest.raises(ValueError, match=r"http URL|[Pp]ort"):
        split_url(url)
