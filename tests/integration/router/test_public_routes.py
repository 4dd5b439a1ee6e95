"""The public port's own routes, what is passed through, and what does not exist."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from tests.fakes.stub_engine import GENERATE
from tests.integration.router.harness import CHAT, COMPLETIONS, bench, deaf_listener, until


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT, GENERATE])
def test_the_generating_routes(path: str) -> None:
    async def case() -> None:
        async with bench() as made:
            whole = await made.post(path)
            assert (whole.status, whole.headers["content-type"].split(";")[0]) == (200, "application/json")
            assert whole.headers["x-request-id"].startswith("hr-")
            assert whole.json["served_by"] == "decode-0"
            stream = await made.post(path, stream=True)
            assert (stream.status, stream.headers["content-type"].split(";")[0]) == (200, "text/event-stream")
            assert len(stream.events) == 4
            assert stream.raw.endswith(b"data: [DONE]\n\n")
            assert {each.path for stub in made.engines for each in stub.requests} == {path}
            assert made.prefill[0].requests[0].generated == 1

    asyncio.run(case())


@pytest.mark.parametrize("fleet", [{"prefill": 1, "decode": 1}, {"prefill": 0, "decode": 0, "colocated": 1}])
def test_models_and_tokenizing_are_passed_through(fleet: dict[str, Any]) -> None:
    async def case() -> None:
        async with bench(**fleet, fenced=True) as made:
            models = await made.get("/v1/models")
            assert (models.status, [each["id"] for each in models.json["data"]]) == (200, ["stub", "stub-latest"])
            for path in ("/tokenize", "/detokenize"):
                body = b'{"prompt" : "hello", "invented": [1.50]}'
                answer = await made.post(path, body)
                assert answer.status == 200
                assert answer.json["asked"] == {"prompt": "hello", "invented": [1.5]}
            assert [each.raw for stub in made.engines for each in stub.asked if each.path != "/v1/models"] == [body] * 2
            assert all(stub.requests == [] for stub in made.engines)

    asyncio.run(case())


def test_what_one_engine_does_not_answer_another_does() -> None:
    async def case() -> None:
        async with bench(prefill=2) as made:
            await made.prefill[0].stop()
            assert (await made.get("/v1/models")).status == 200
            assert (await made.post("/tokenize", {"prompt": "x"})).status == 200

    asyncio.run(case())


def test_questions_go_to_the_engines_in_turn() -> None:
    async def case() -> None:
        async with bench(prefill=2, decode=2) as made:
            for _ in range(8):
                assert (await made.post("/tokenize", {"prompt": "x"})).status == 200
            assert [len(stub.asked) for stub in made.engines] == [2, 2, 2, 2]

    asyncio.run(case())


def test_an_engine_that_is_silent_is_left_after_a_while() -> None:
    async def case() -> None:
        async with bench(question_timeout_s=0.2, probe_timeout_s=60.0) as made:
            await made.prefill[0].stop()
            with deaf_listener(made.prefill[0].port):
                for _ in range(2):
                    assert (await made.post("/tokenize", {"prompt": "x"})).status == 200
            assert len(made.decode[0].asked) == 2

    asyncio.run(case())


@pytest.mark.parametrize("name", ["stub", "stub-latest", "no-such-model"])
def test_a_models_names_are_the_engines_business(name: str) -> None:
    async def case() -> None:
        async with bench() as made:
            assert (await made.post(model=name)).status == 200
            assert {stub.requests[0].body["model"] for stub in made.engines} == {name}

    asyncio.run(case())


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("GET", "/nowhere"),
        ("GET", COMPLETIONS),
        ("DELETE", CHAT),
        ("POST", "/health"),
        ("POST", "/state"),
        ("POST", "/gate"),
        ("POST", "/pause"),
        ("POST", "/update_weights"),
        ("POST", "/collective_rpc"),
        ("GET", "/fence"),
        ("POST", "/v1/embeddings"),
        ("GET", "/v1/completions/../../state"),
        ("GET", "//health"),
    ],
)
def test_anything_else_is_a_404_in_json(method: str, path: str) -> None:
    async def case() -> None:
        async with bench() as made:
            reader, writer = await asyncio.open_connection("127.0.0.1", made.router.port)
            writer.write(f"{method} {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n".encode())
            head, _, body = (await reader.read()).partition(b"\r\n\r\n")
            writer.close()
            await writer.wait_closed()
            assert head.split()[1] == b"404"
            assert b"application/json" in head
            assert body.startswith(b'{"error":{')
            assert await made.metric("requests_total", route="other", code="404") == 1
            assert [stub.arrived for stub in made.engines] == [0, 0]

    asyncio.run(case())


@pytest.mark.parametrize("path", ["/health", "/ready", "/v1/models"])
def test_head_is_get_without_a_body(path: str) -> None:
    async def case() -> None:
        async with bench() as made:
            get, head = await made.get(path), await made.get(path, "HEAD")
            assert (head.status, head.raw) == (200, b"")
            assert head.headers["Content-Length"] == str(len(get.raw))

    asyncio.run(case())


def test_finishing_a_session_is_idempotent_and_takes_numbers() -> None:
    async def case() -> None:
        async with bench() as made:
            assert (await made.post(session_id=7)).status == 200
            assert await made.metric("active_sessions", role="decode") == 1
            for _ in range(2):
                answer = await made.post("/finish_session", {"session_id": 7})
                assert (answer.status, answer.json) == (200, {"session_id": "7", "finished": True})
            assert await made.metric("active_sessions") == 0
            for body in (b"{}", b"[]", b'{"session_id": null}', b'{"session_id": [1]}'):
                answer = await made.post("/finish_session", body)
                assert (answer.status, answer.json["error"]["param"]) == (400, "session_id")

    asyncio.run(case())


def test_a_session_may_have_any_name_in_header_and_body() -> None:
    async def case() -> None:
        async with bench() as made:
            for name in ("na\u00e9", "\u6f22"):
                await made.post(session=name)
                assert (await made.post(session_id=name)).headers[
                    "x-headrace-choice"
                ] == "prefill=pinned, decode=pinned"
                await made.finish(name)
            assert await made.metric("active_sessions") == 0

    asyncio.run(case())


def test_a_session_that_is_finished_during_a_request_ends_with_it() -> None:
    async def case() -> None:
        async with bench() as made:
            made.decode[0].answers.clear()
            running = made.start(session="s")
            await until(lambda: made.decode[0].open == 1)
            await made.finish("s")
            assert await made.metric("active_sessions", role="decode") == 1
            made.decode[0].answers.set()
            assert (await running).status == 200
            assert await made.metric("active_sessions") == 0

    asyncio.run(case())


@pytest.mark.parametrize("named", ["header", "body"])
@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_a14_an_abort_by_id_reaches_the_engine_that_has_the_request(role: str, named: str) -> None:
    async def case() -> None:
        async with bench() as made:
            engine = getattr(made, role)[0]
            engine.answers.clear()
            mine = made.start(headers={"X-Request-Id": "mine"}) if named == "header" else made.start(request_id="mine")
            other = made.start(request_id="other")
            await until(lambda: engine.open == 2)
            answer = await made.post("/abort_requests", {"request_ids": ["mine"]})
            assert (answer.status, answer.json) == (200, {"aborted": ["mine"]})
            await until(lambda: engine.open == 1)
            assert engine.closed_early == 1
            assert (await mine).status == 499
            engine.answers.set()
            assert (await other).status == 200
            assert await made.metric("retries_total") == 0

    asyncio.run(case())


def test_a14_an_abort_ends_a_stream_and_a_request_in_line() -> None:
    async def case() -> None:
        async with bench(max_requests=1) as made:
            decode = made.decode[0]
            decode.token_s = 30.0
            stream = made.start(stream=True, request_id="stream")
            await until(lambda: len(decode.sent_at) == 1)
            line = made.start(request_id="line")
            await until(lambda: made.dispatcher.waiting == 1)
            for name in ("line", "stream"):
                assert (await made.post("/abort_requests", {"request_id": name})).status == 200
            assert (await stream).events[-1]["error"]["code"] == 499
            assert (await line).status == 499
            await until(lambda: decode.open == 0)
            assert len(made.prefill[0].requests) == 1
            assert (made.dispatcher.admitted, made.dispatcher.waiting) == (0, 0)

    asyncio.run(case())


def test_an_abort_names_so_many_requests() -> None:
    async def case() -> None:
        async with bench() as made:
            answer = await made.post("/abort_requests", {"request_ids": ["nobody"] * 1001})
            assert (answer.status, answer.json["error"]["param"]) == (400, "request_ids")
            assert (await made.post("/abort_requests", {"request_ids": ["nobody"] * 1000})).status == 404

    asyncio.run(case())


def test_a14_an_abort_of_nobody_is_a_404_in_json() -> None:
    async def case() -> None:
        async with bench() as made:
            assert (await made.post(request_id="over")).status == 200
            for name in ("never", "over"):
                answer = await made.post("/abort_requests", {"request_ids": [name]})
                assert (answer.status, answer.json["error"]["param"]) == (404, "request_ids")
                assert name in answer.message
            for body in (b"{}", b'{"request_ids": []}', b'{"request_ids": "x"}', b'{"all": true}'):
                answer = await made.post("/abort_requests", body)
                assert (answer.status, answer.json["error"]["param"]) == (400, "request_ids")

    asyncio.run(case())
