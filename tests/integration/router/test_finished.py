"""Finished requests that a router keeps for an audit."""

from __future__ import annotations

import asyncio
import base64
import json
from typing import Any

import pytest

from tests.fakes.stub_engine import GENERATE
from tests.integration.router.harness import CHAT, COMPLETIONS, Bench, LeavingClient, bench, until

ASKED = {"logprobs": 1, "return_token_ids": True}


async def finished(made: Bench) -> list[dict[str, Any]]:
    return list((await made.command("/finished", method="GET")).json["requests"])


def reply_of(kept: dict[str, Any]) -> bytes:
    return base64.b64decode(kept["reply"])


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT, GENERATE])
@pytest.mark.parametrize("workers", [1, 2])
def test_a_request_is_kept_as_it_was_sent_and_answered(path: str, workers: int) -> None:
    async def case() -> None:
        fields = {"sampling_params": {"logprobs": 1}} if path == GENERATE else dict(ASKED)
        async with bench(audit_share=1.0, workers=workers) as made:
            whole = await made.post(path, **fields)
            streamed = await made.post(path, **fields, stream=True)
            kept = await finished(made)
            assert sorted(map(reply_of, kept)) == sorted([whole.raw, streamed.raw])
            assert {each["epoch"] for each in kept} == {1}
            assert {each["version"] for each in kept} == {"v1"}
            assert kept[0]["replicas"] == {"prefill": "prefill-0", "decode": "decode-0"}
            assert len({each["id"] for each in kept}) == 2
            asked = [json.loads(base64.b64decode(each["body"])) for each in kept]
            assert all(fields.items() <= each.items() for each in asked)

    asyncio.run(case())


def test_only_some_are_kept_and_the_newest_stay() -> None:
    async def case() -> None:
        async with bench(audit_share=0.5, audit_kept=2) as made:
            replies = [(await made.post(**ASKED)).raw for _ in range(8)]
            assert [reply_of(each) for each in await finished(made)] == [replies[5], replies[7]]

    asyncio.run(case())


def test_what_could_not_be_compared_is_not_kept() -> None:
    """Replies without token ids, refusals, those whose client left, and replays of other requests."""

    async def case() -> None:
        async with bench(audit_share=1.0) as made:
            assert (await made.post()).status == 200
            assert (await made.post(**ASKED, kv_transfer_params={})).status == 400
            assert (await made.post(**ASKED, headers={"x-headrace-replay": "true"})).status == 200
            made.decode[0].token_s = 0.2
            leaving = await LeavingClient.sending(made, stream=True, **ASKED)
            await until(lambda: len(made.decode[0].requests) == 3)
            await leaving.leave()
            await made.metric_reaches(1, "client_gone_total")
            assert await finished(made) == []

    asyncio.run(case())


@pytest.mark.parametrize("workers", [1, 2])
def test_what_audits_found_is_counted(workers: int) -> None:
    async def case() -> None:
        async with bench(workers=workers) as made:
            assert await made.metric("audits_total", outcome="disagrees") == 0
            for _ in range(2):
                assert (await made.command("/audited", {"outcomes": {"agrees": 3, "disagrees": 1}})).status == 200
            assert await made.metric("audits_total", outcome="agrees") == 6
            assert await made.metric("audits_total", outcome="disagrees") == 2
            assert (await made.command("/audited", {"outcomes": {"perhaps": 1}})).status == 400

    asyncio.run(case())


def test_nothing_is_kept_unasked() -> None:
    async def case() -> None:
        async with bench() as made:
            assert (await made.post(**ASKED)).status == 200
            assert await finished(made) == []

    asyncio.run(case())
