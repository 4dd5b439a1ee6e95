"""Who is who: request ids, bodies that are no text, label values, counters, lives of an engine (field cases A18, A35,
A37, A38, A41)."""

from __future__ import annotations

import asyncio
import json

import pytest

from tests.integration.router.harness import CHAT, COMPLETIONS, bench, until


def test_a18_ids_are_unique_per_attempt_and_equal_on_both_legs() -> None:
    async def case() -> None:
        async with bench() as made:
            made.decode[0].status, made.decode[0].fail_first = 500, 1
            body = {"prompt": "hello", "request_id": "mine"}
            both = await asyncio.gather(*(made.post(body=body, headers={"X-Request-Id": "mine"}) for _ in range(2)))
            again = await made.post(body=body, headers={"X-Request-Id": "mine"})
            for answer in (*both, again):
                assert (answer.status, answer.headers["x-request-id"]) == (200, "mine")
            own = [answer.json["id"] for answer in (*both, again)]
            assert len(set(own)) == 3
            prefill = [each.request_id for each in made.prefill[0].requests]
            decode = [each.request_id for each in made.decode[0].requests]
            assert len(set(prefill)) == len(prefill) == 4
            assert sorted(prefill) == sorted(decode)
            assert set(own) < set(decode)
            assert all("request_id" not in each.body for each in made.prefill[0].requests + made.decode[0].requests)
            echoed = await made.post(request_id="in the body")
            assert echoed.headers["x-request-id"] == "in the body"

    asyncio.run(case())


@pytest.mark.parametrize("body", [b'{"prompt": "\xff\xfe"}', b'{"prompt": "hel', b"[1]", b"", b"[" * 50_000])
@pytest.mark.parametrize("path", [COMPLETIONS, CHAT, "/tokenize", "/finish_session", "/abort_requests"])
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
            assert made.prefill[0].requests == made.prefill[0].asked == made.decode[0].asked == []
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
                await asyncio.gather(
                    *(made.post(session=f"s{n}", request_id=f"r{n}", model=f"model-{n}") for n in numbers)
                )
                await asyncio.gather(*(made.get(f"/jobs/{n}") for n in range(start // 5, start // 5 + 10)))
            text = (await made.get("/metrics")).raw
            assert len(text.splitlines()) - before < 50
            for part in (b"/jobs/", b"s999", b"r999", b"model-999", b"hello"):
                assert part not in text
            assert await made.metric("requests_total", route="other", code="404") == 200
            assert await made.metric("requests_total", route=COMPLETIONS, code="200") == 1001

    asyncio.run(case())


def test_a38_a_counter_never_falls_and_ends_at_what_was_sent() -> None:
    async def case() -> None:
        async with bench() as made:
            seen = []
            for _ in range(20):
                await asyncio.gather(*(made.post() for _ in range(5)))
                seen.append(await made.metric("requests_total", route=COMPLETIONS))
            assert seen == sorted(seen)
            assert seen[-1] == 100
            assert await made.metric("legs_total", role="decode", outcome="ok") == 100
        async with bench() as restarted:
            assert await restarted.metric("requests_total", route=COMPLETIONS) == 0

    asyncio.run(case())


def test_a41_a_request_that_meets_another_life_of_an_engine_is_served_elsewhere() -> None:
    async def case() -> None:
        # No probe notices before the request does.
        async with bench(fenced=True, decode=2, probe_interval_s=30.0, retries=1) as made:
            reborn = made.decode[0]
            assert (await made.post(session="s")).decode == reborn.name
            await reborn.restart("decode-0.b")
            answer = await made.post(session="s")
            assert (answer.status, answer.decode) == (200, "decode-1")
            (refused,) = reborn.refused
            assert refused.headers["x-headrace-instance"] == "decode-0.a"
            first, second = made.prefill[0].requests[1:]
            assert made.decode[1].requests[0].handoff["remote_request_id"] == second.request_id != first.request_id

    asyncio.run(case())


def test_a41_another_life_behind_the_same_port_is_not_used_until_confirmed() -> None:
    async def case() -> None:
        async with bench(fenced=True, decode=2) as made:
            reborn = made.decode[0]
            await reborn.restart("decode-0.b")

            def instance() -> str:
                return made.dispatcher.fleet.members[reborn.name].instance

            await until(lambda: instance() == "decode-0.b")
            before = len(reborn.refused)
            for _ in range(6):
                assert (await made.post()).decode == "decode-1"
            view = next(each for each in (await made.state())["replicas"] if each["name"] == reborn.name)
            assert (view["instance"], view["epoch"], view["usable"]) == ("decode-0.b", None, False)
            assert await made.metric("replica_epoch", replica=reborn.name) == -1

            # The confirmation of an earlier life is not one of this life.
            old = {"epoch": 1, "version": "v1", "replicas": [{"name": reborn.name, "instance": "decode-0.a"}]}
            assert (await made.command("/epochs", old)).status == 409
            assert not made.is_usable(reborn.name)
            await made.commit(1, "v1", reborn)
            assert {(await made.post()).decode for _ in range(4)} == {"decode-0", "decode-1"}
            assert len(reborn.refused) == before

    asyncio.run(case())


def test_a41_an_engine_without_a_confirmed_epoch_serves_nothing() -> None:
    async def case() -> None:
        async with bench(fenced=True, retries=0) as made:
            assert made.decode[0].fence is not None
            made.decode[0].fence.epoch = None
            answer = await made.post()
            assert (answer.status, answer.headers["Retry-After"]) == (503, "1")
            assert "no epoch is confirmed here" in answer.message
            assert made.decode[0].requests == []

    asyncio.run(case())
