"""How often a failed request is tried again, and how long a failing replica rests."""

from __future__ import annotations

import asyncio

import pytest

from tests.integration.router.harness import Bench, bench, until


def _breaker(made: Bench, name: str) -> str:
    return made.dispatcher.fleet.members[name].breaker.state


async def _fail(made: Bench, times: int) -> None:
    for _ in range(times):
        assert (await made.post()).status == 500


def test_a_breaker_opens_rests_tries_one_leg_and_closes() -> None:
    async def case() -> None:
        async with bench(leg_failures=3, retries=0, breaker_open_s=0.3) as made:
            decode = made.decode[0]
            decode.status = 500
            await _fail(made, 3)
            assert _breaker(made, decode.name) == "open"
            # A good probe alone does not bring it back before it has rested.
            assert (await made.post()).status == 503
            assert len(decode.requests) == 3
            await until(lambda: made.is_usable(decode.name))
            assert _breaker(made, decode.name) == "trial"
            decode.status = 200
            decode.answers.clear()
            both = [made.start(), made.start()]
            await until(lambda: decode.open == 1 and made.dispatcher.waiting == 1)
            assert len(decode.requests) == 4
            decode.answers.set()
            assert [(await each).status for each in both] == [200, 200]
            assert _breaker(made, decode.name) == "closed"

    asyncio.run(case())


def test_a_trial_that_fails_rests_for_longer() -> None:
    async def case() -> None:
        async with bench(leg_failures=1, retries=0, breaker_open_s=0.2, breaker_max_open_s=0.5) as made:
            decode = made.decode[0]
            decode.status = 500
            rests = []
            for _ in range(3):
                await _fail(made, 1)
                assert not made.is_usable(decode.name)
                rests.append(await until(lambda: made.is_usable(decode.name)))
            assert rests[0] >= 0.15
            assert rests[1] >= 0.35
            assert rests[2] >= 0.45

    asyncio.run(case())


def test_successes_between_failures_keep_a_breaker_closed() -> None:
    async def case() -> None:
        async with bench(leg_failures=3, retries=0) as made:
            for _ in range(3):
                made.decode[0].status = 500
                await _fail(made, 2)
                made.decode[0].status = 200
                assert (await made.post()).status == 200
            assert _breaker(made, "decode-0") == "closed"

    asyncio.run(case())


def test_a_retry_comes_after_a_pause_that_doubles() -> None:
    async def case() -> None:
        async with bench(decode=3, retries=2, retry_backoff_s=0.4, leg_failures=10) as made:
            for stub in made.decode:
                stub.status = 503
            answer = await made.post()
            assert answer.status == 503
            first, second, third = sorted(each.at for stub in made.decode for each in stub.requests)
            # Up to half of each pause is taken off, so that those who failed together don't come back together.
            assert second - first >= 0.2
            assert third - second >= 0.4

    asyncio.run(case())


def test_a_retry_goes_elsewhere() -> None:
    async def case() -> None:
        async with bench(prefill=2, decode=2, retries=1) as made:
            made.prefill[0].status = 500
            for number in range(4):
                answer = await made.post(session=f"s{number}")
                assert (answer.status, answer.prefill) == (200, "prefill-1")
            assert len(made.prefill[0].requests) > 0

    asyncio.run(case())


def test_a_fleet_in_which_everything_fails_is_soon_asked_once_per_request() -> None:
    async def case() -> None:
        async with bench(
            decode=4, retries=3, retry_burst=5, retry_budget=0.2, retry_backoff_s=0.0, leg_failures=10_000
        ) as made:
            for stub in made.decode:
                stub.status = 500
            for _ in range(40):
                assert (await made.post()).status == 500
            assert sum(len(stub.requests) for stub in made.decode) == 45
            assert await made.metric("retries_total") == 5

            # What is served pays for further retries: five requests for one.
            for stub in made.decode:
                stub.status = 200
            for _ in range(5):
                assert (await made.post()).status == 200
            for stub in made.decode:
                stub.status = 500
            assert [(await made.post()).status for _ in range(3)] == [500] * 3
            assert await made.metric("retries_total") == 6

    asyncio.run(case())


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_an_engines_own_error_is_passed_on_when_no_retry_is_left(role: str) -> None:
    async def case() -> None:
        async with bench(retries=1) as made:
            engine = getattr(made, role)[0]
            engine.status, engine.error_body = 500, b'{"error": {"message": "out of blocks",  "code": 500}}'
            answer = await made.post()
            assert (answer.status, answer.raw) == (500, engine.error_body)
            assert len(engine.requests) == 2

    asyncio.run(case())
