"""The internal port: who may use it, and what it shows."""

from __future__ import annotations

import asyncio

import pytest

from tests.integration.router.harness import TOKEN, bench, until

ROUTES = [
    ("GET", "/state"),
    ("POST", "/gate"),
    ("POST", "/epochs"),
    ("POST", "/in_flight"),
    ("POST", "/replicas"),
    ("POST", "/replicas/decode-0/drain"),
    ("DELETE", "/replicas/decode-0"),
    ("GET", "/finished"),
    ("POST", "/audited"),
    ("GET", "/nowhere"),
]


@pytest.mark.parametrize(("method", "path"), ROUTES, ids=[" ".join(each) for each in ROUTES])
def test_every_route_asks_for_the_token(method: str, path: str) -> None:
    async def case() -> None:
        async with bench() as made:
            for headers in ({}, {"Authorization": "Bearer other"}, {"Authorization": f"Basic {TOKEN}"}):
                async with made.client.request(method, made.admin_url + path, headers=headers) as reply:
                    assert reply.status == 401
                    assert (await reply.json())["error"]["type"] == "AuthenticationError"
            state = await made.state()
            assert (state["gate"], len(state["replicas"])) == ("open", 2)

    asyncio.run(case())


def test_the_state_is_told_whole() -> None:
    async def case() -> None:
        async with bench(fenced=True) as made:
            made.decode[0].answers.clear()
            running = made.start(session="s")
            await until(lambda: made.decode[0].open == 1)
            state = await made.state()
            replicas = state.pop("replicas")
            assert state == {
                "job": "test",
                "gate": "open",
                "order": [0, 0, 0],
                "epochs": {"1": "v1"},
                "sessions": 1,
                "waiting": 0,
                "admitted": 1,
            }
            tokens = replicas[1].pop("tokens_in_flight")
            assert tokens > 0
            assert replicas[1] == {
                "name": "decode-0",
                "role": "decode",
                "url": made.decode[0].url,
                "instance": "decode-0.a",
                "epoch": 1,
                "usable": True,
                "draining": False,
                "breaker": "closed",
                "active_sessions": 1,
                "legs_in_flight": 1,
                "handoffs_failed": 0,
            }
            made.decode[0].answers.set()
            assert (await running).status == 200

    asyncio.run(case())


HUGE = b'{"gate": "open", "update": %d}' % 2**64
"""Taken, it would make every later command an older one."""


@pytest.mark.parametrize("body", [b'{"gate": "ajar"}', b"{", b'{"gate": "open", "x": 1}', b"[]", b"\xff", b"", HUGE])
def test_a_command_that_is_none_is_refused(body: bytes) -> None:
    async def case() -> None:
        async with bench() as made:
            headers = {"Authorization": f"Bearer {TOKEN}"}
            async with made.client.post(made.admin_url + "/gate", data=body, headers=headers) as reply:
                assert (reply.status, (await reply.json())["error"]["param"]) == (400, "gate")
            assert (await made.state())["gate"] == "open"

    asyncio.run(case())


def test_the_two_ports_share_no_route() -> None:
    async def case() -> None:
        async with bench() as made:
            for path in ("/v1/models", "/health", "/metrics", "/finish_session"):
                for method in ("GET", "POST"):
                    answer = await made.command(path, {}, method)
                    assert (answer.status, answer.json["error"]["code"]) == (404, 404)

    asyncio.run(case())
