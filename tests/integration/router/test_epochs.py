"""Epochs over real HTTP: who may be paired with whom, minimum versions, and what replies say of their making."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from tests.fakes.stub_engine import GENERATE
from tests.integration.router.harness import CHAT, COMPLETIONS, Answer, Bench, bench, until

ROUTES = [COMPLETIONS, CHAT, GENERATE]


async def _split_fleet(made: Bench) -> None:
    """Epoch 1 on the first of each role, epoch 2 on the second."""
    await made.commit(2, "v2", made.prefill[1], made.decode[1])


def _at_least(version: str) -> dict[str, str]:
    return {"x-headrace-min-version": version}


def test_pairs_are_made_within_one_epoch_only() -> None:
    async def case() -> None:
        async with bench(fenced=True, prefill=2, decode=2) as made:
            await _split_fleet(made)
            answers = [await made.post(session=f"s{number}") for number in range(12)]
            assert {each.status for each in answers} == {200}
            pairs = {(each.prefill, each.decode, each.headers["x-headrace-epoch"]) for each in answers}
            assert pairs == {("prefill-0", "decode-0", "1"), ("prefill-1", "decode-1", "2")}
            assert [stub.refused for stub in made.engines] == [[], [], [], []]

    asyncio.run(case())


def test_a_handoff_whose_epoch_has_gone_is_made_anew_in_another() -> None:
    async def case() -> None:
        async with bench(fenced=True, prefill=2, decode=2) as made:
            await _split_fleet(made)
            first = made.prefill[0]
            first.answers.clear()
            made.prefill[1].answers.clear()
            running = [made.start() for _ in range(2)]
            await until(lambda: first.open == 1)
            await made.commit(2, "v2", made.decode[0])
            first.answers.set()
            made.prefill[1].answers.set()
            answers = [await each for each in running]
            assert {(each.status, each.prefill, each.headers["x-headrace-epoch"]) for each in answers} == {
                (200, "prefill-1", "2")
            }
            assert [stub.refused for stub in made.engines] == [[], [], [], []]
            assert await made.metric("handoffs_total", outcome="unused") == 1

    asyncio.run(case())


def test_no_epoch_with_both_roles_means_503() -> None:
    async def case() -> None:
        async with bench() as made:
            await made.commit(2, "v2", made.decode[0])
            answer, ready = await made.post(), await made.get("/ready")
            assert (answer.status, ready.status) == (503, 503)
            assert "no epoch has both" in answer.message
            assert "no epoch has both" in ready.message

    asyncio.run(case())


def test_a_minimum_version_that_is_served_is_chosen() -> None:
    async def case() -> None:
        async with bench(prefill=2, decode=2) as made:
            await _split_fleet(made)
            assert {(await made.post(headers=_at_least("v2"))).decode for _ in range(4)} == {"decode-1"}
            assert {(await made.post(headers=_at_least("v1"))).decode for _ in range(4)} == {"decode-0", "decode-1"}

    asyncio.run(case())


def test_versions_are_ordered_by_commitment_and_not_by_name() -> None:
    async def case() -> None:
        async with bench() as made:
            await made.commit(2, "a-name-that-sorts-first")
            answer = await made.post(headers=_at_least("v1"))
            assert answer.headers["x-headrace-weight-version"] == "a-name-that-sorts-first"

    asyncio.run(case())


def test_a_request_waits_for_a_version_that_comes_later() -> None:
    async def case() -> None:
        async with bench() as made:
            waiting = made.start(headers=_at_least("v2"))
            await until(lambda: made.dispatcher.waiting == 1)
            # It holds up nobody else.
            assert (await made.post()).headers["x-headrace-weight-version"] == "v1"
            await made.commit(2, "v2")
            answer = await waiting
            assert (answer.status, answer.headers["x-headrace-weight-version"]) == (200, "v2")

    asyncio.run(case())


def test_a_version_that_never_comes_means_503() -> None:
    async def case() -> None:
        async with bench(max_wait_s=0.3) as made:
            answer = await made.post(headers=_at_least("never"))
            assert (answer.status, answer.headers["Retry-After"]) == (503, "1")
            assert "x-headrace-min-version" in answer.message
            assert made.prefill[0].requests == []

    asyncio.run(case())


def test_a_version_rolled_back_to_counts_from_its_first_commitment() -> None:
    async def case() -> None:
        async with bench() as made:
            await made.commit(2, "v2")
            await made.commit(3, "v1")
            answer = await made.post(headers=_at_least("v2"))
            # Committed after v2 was: that is all that "at least" says.
            assert (answer.status, answer.headers["x-headrace-epoch"]) == (200, "3")

    asyncio.run(case())


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", ROUTES)
def test_replies_say_what_produced_them(path: str, stream: bool) -> None:
    async def case() -> None:
        async with bench(fenced=True) as made:
            await made.commit(7, "step-1200")
            answer = await made.post(path, stream=stream, session="s")
            assert answer.status == 200
            assert answer.headers["x-headrace-epoch"] == "7"
            assert answer.headers["x-headrace-weight-version"] == "step-1200"
            assert (answer.prefill, answer.decode) == ("prefill-0", "decode-0")
            assert answer.headers["x-headrace-choice"] == "prefill=new, decode=new"
            assert b"headrace" not in answer.raw
            again = await made.post(path, session="s")
            assert again.headers["x-headrace-choice"] == "prefill=pinned, decode=pinned"

    asyncio.run(case())


@pytest.mark.parametrize("version", ["grün", "a\r\nx-evil: 1", "x" * 3000])
def test_a_versions_name_may_be_any_text(version: str) -> None:
    async def case() -> None:
        async with bench() as made:
            await made.commit(2, version)
            answer = await made.post(return_headrace=True)
            assert answer.json["headrace"]["weight_versions"] == [version]
            header = answer.headers["x-headrace-weight-version"]
            assert header.isascii()
            assert header.encode("ascii").decode("unicode_escape") == version
            assert "x-evil" not in answer.headers

    asyncio.run(case())


LABEL = {
    "prefill": "prefill-0",
    "decode": "decode-0",
    "epochs": [7],
    "weight_versions": ["step-1200"],
    "single_version": True,
    "attempts": 1,
}


@pytest.mark.parametrize("path", ROUTES)
def test_a_reply_carries_the_label_where_the_client_asks(path: str) -> None:
    async def case() -> None:
        async with bench() as made:
            await made.commit(7, "step-1200")
            answer = await made.post(path, return_headrace=True)
            assert answer.json["headrace"] == LABEL
            assert all("return_headrace" not in stub.requests[0].body for stub in made.engines)
            assert "headrace" not in (await made.post(path, return_headrace=False)).json

    asyncio.run(case())


@pytest.mark.parametrize("usage", [False, True])
@pytest.mark.parametrize("path", ROUTES)
def test_a_stream_carries_the_label_in_its_last_event(path: str, usage: bool) -> None:
    async def case() -> None:
        async with bench() as made:
            await made.commit(7, "step-1200")
            fields: dict[str, Any] = {"stream": True, "return_headrace": True}
            if usage:
                fields["stream_options"] = {"include_usage": True}
            answer = await made.post(path, **fields)
            *tokens, last = answer.events
            assert (len(tokens), last["choices"], last["headrace"]) == (4, [], LABEL)
            assert ("usage" in last) == usage
            assert not any("headrace" in each for each in tokens)
            assert answer.raw.endswith(b"data: [DONE]\n\n")

    asyncio.run(case())


def test_a_colocated_reply_has_one_replica_under_both_names() -> None:
    async def case() -> None:
        async with bench(prefill=0, decode=0, colocated=2) as made:
            answer = await made.post(return_headrace=True)
            label = answer.json["headrace"]
            assert label["prefill"] == label["decode"] == answer.prefill == answer.decode
            assert label["single_version"] is True

    asyncio.run(case())


async def _refused(made: Bench, **body: Any) -> tuple[int, str]:
    answer: Answer = await made.command("/epochs", {"epoch": 2, "version": "v2", **body})
    return answer.status, answer.json["error"]["param"]


def test_an_epoch_that_can_not_be_is_refused_whole() -> None:
    async def case() -> None:
        async with bench(fenced=True) as made:
            both = [{"name": "decode-0"}, {"name": "nobody"}]
            assert await _refused(made, replicas=both) == (404, "replicas")
            wrong = [{"name": "decode-0", "instance": "another"}]
            assert await _refused(made, replicas=wrong) == (409, "replicas")
            assert await _refused(made, epoch=1) == (409, "epoch")
            assert await _refused(made, epoch="2") == (400, "epoch")
            assert await _refused(made, epoch=-1) == (400, "epoch")
            assert await _refused(made, epoch=2**64) == (400, "epoch")
            assert await _refused(made, version="") == (400, "epoch")
            assert await _refused(made, surprise=1) == (400, "epoch")
            state = await made.state()
            assert state["epochs"] == {"1": "v1"}
            assert {each["epoch"] for each in state["replicas"]} == {1}
            named = [{"name": each.name, "instance": f"{each.name}.a"} for each in made.engines]
            answer = await made.command("/epochs", {"epoch": 2, "version": "v2", "replicas": named})
            assert (answer.status, answer.json["replicas"]) == (200, ["prefill-0", "decode-0"])

    asyncio.run(case())


def test_an_epoch_without_names_is_confirmed_for_all() -> None:
    async def case() -> None:
        async with bench() as made:
            for _ in range(2):
                answer = await made.command("/epochs", {"epoch": 2, "version": "v2"})
                assert (answer.status, answer.json["replicas"]) == (200, ["prefill-0", "decode-0"])
            assert await made.metric("replica_epoch", replica="decode-0") == 2
            assert (await made.post()).headers["x-headrace-epoch"] == "2"

    asyncio.run(case())
