"""The salt of each leg: what keeps the KV of one epoch from meeting another's."""

from __future__ import annotations

import asyncio
import re
from typing import Any

import pytest

from tests.fakes.stub_engine import GENERATE
from tests.integration.router.harness import CHAT, COMPLETIONS, Bench, bench, until

ROUTES = [COMPLETIONS, CHAT, GENERATE]


def _salts(made: Bench) -> list[str]:
    """Of the last request: what each of its legs carried."""
    engines = [stub for stub in made.engines if stub.requests]
    return [stub.requests[-1].body["cache_salt"] for stub in engines]


@pytest.mark.parametrize("path", ROUTES)
def test_both_legs_carry_one_salt_that_changes_with_the_epoch(path: str) -> None:
    async def case() -> None:
        async with bench(fenced=True) as made:
            salts = set()
            for epoch in (1, 2, 3):
                await made.commit(epoch, f"v{epoch}")
                assert (await made.post(path)).status == 200
                first, second = _salts(made)
                assert first == second
                assert re.fullmatch(rf"{epoch}\.[0-9a-f]{{40}}", first)
                salts.add(first)
                for stub in made.engines:
                    headers = stub.requests[-1].headers
                    assert (headers["x-headrace-epoch"], headers["x-headrace-salted"]) == (str(epoch), "1")
            assert len(salts) == 3

    asyncio.run(case())


@pytest.mark.parametrize("path", ROUTES)
def test_a_clients_own_salt_separates_and_is_never_sent(path: str) -> None:
    async def case() -> None:
        async with bench() as made:
            seen: dict[str, str] = {}
            for own in ("", "tenant-a", "tenant-b", "tenant-a"):
                fields: dict[str, Any] = {"cache_salt": own} if own else {}
                assert (await made.post(path, **fields)).status == 200
                first, second = _salts(made)
                assert first == second == seen.setdefault(own, first)
                assert re.fullmatch(r"1\.[0-9a-f]{40}", first)
                for stub in made.engines:
                    assert b"tenant" not in stub.requests[-1].raw
            assert len(set(seen.values())) == 3
            # Whoever knows what the router sends can't name another's cache with it.
            assert (await made.post(path, cache_salt=seen[""])).status == 200
            assert _salts(made)[0] not in seen.values()

    asyncio.run(case())


@pytest.mark.parametrize("salt", ["", "a" * 129, "a@b", "a/b", "a\\b", "a\0b", 7])
def test_a_salt_that_engines_refuse_is_refused(salt: object) -> None:
    async def case() -> None:
        async with bench() as made:
            answer = await made.post(cache_salt=salt)
            assert (answer.status, answer.json["error"]["param"]) == (400, "cache_salt")
            assert made.prefill[0].requests == []

    asyncio.run(case())


def test_two_epochs_at_once_have_two_salts() -> None:
    async def case() -> None:
        async with bench(prefill=2, decode=2) as made:
            await made.commit(2, "v2", made.prefill[1], made.decode[1])
            for number in range(4):
                assert (await made.post(session=f"s{number}")).status == 200
            salts = [{each.body["cache_salt"] for each in stub.requests} for stub in made.engines]
            assert [len(each) for each in salts] == [1, 1, 1, 1]
            assert salts[0] == salts[2] != salts[1] == salts[3]

    asyncio.run(case())


def test_a_colocated_engine_is_salted_too() -> None:
    async def case() -> None:
        async with bench(prefill=0, decode=0, colocated=1, fenced=True) as made:
            for path in ROUTES:
                assert (await made.post(path)).status == 200
            salts = {each.body["cache_salt"] for each in made.colocated[0].requests}
            assert len(salts) == 1

    asyncio.run(case())


def test_the_salt_is_chosen_when_the_leg_is_sent() -> None:
    async def case() -> None:
        async with bench(gate="frozen", fenced=True) as made:
            waiting = made.start()
            await until(lambda: made.dispatcher.waiting == 1)
            await made.commit(2, "v2")
            await made.set_gate("open")
            answer = await waiting
            assert (answer.status, answer.headers["x-headrace-epoch"]) == (200, "2")
            assert (await made.post()).status == 200
            assert len({each.body["cache_salt"] for each in made.prefill[0].requests}) == 1

    asyncio.run(case())


def test_the_engines_token_reaches_engines_and_no_client() -> None:
    async def case() -> None:
        async with bench(fenced=True) as made:
            answer = await made.post(headers={"Authorization": "Bearer sk-client", "Cookie": "secret"})
            assert answer.status == 200
            for stub in made.engines:
                headers = stub.requests[-1].headers
                assert headers["authorization"] == f"Bearer {stub.token}"
                assert "cookie" not in headers
                assert headers["x-headrace-instance"] == f"{stub.name}.a"
            assert "authorization" not in {name.lower() for name in answer.headers}

    asyncio.run(case())
