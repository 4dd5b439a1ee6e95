"""Deadlines ring, whatever becomes of others."""

from __future__ import annotations

import asyncio
from typing import Any

from router.io.alarms import Alarms
from tests.integration.router.harness import until


class Sleeper:
    def __init__(self, *, fails: bool = False) -> None:
        self.fails = fails
        self.woken = 0

    def time_reached(self) -> None:
        self.woken += 1
        if self.fails:
            raise ValueError("a bug")


def test_a_sleeper_that_fails_keeps_no_other_asleep() -> None:
    async def case() -> None:
        loop, errors = asyncio.get_running_loop(), list[dict[str, Any]]()
        loop.set_exception_handler(lambda _loop, context: errors.append(context))
        alarms, failing, other, late = Alarms(loop), Sleeper(fails=True), Sleeper(), Sleeper()
        alarms.set(failing, 0.0)
        alarms.set(other, 0.0)
        await until(lambda: other.woken == 1)
        alarms.set(late, 0.0)
        await until(lambda: late.woken == 1)
        assert (failing.woken, other.woken) == (1, 1)
        assert [str(each["exception"]) for each in errors] == ["a bug"]

    asyncio.run(case())
