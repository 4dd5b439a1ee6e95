"""Two prefill and two decode engines under 200 clients at a time: what comes out is what one engine gives.

After it nothing is left in the router or the engines. The same fleet shows that the weight epoch is in force: in every
reply, and at each engine's own door.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.e2e.conversations import TOLERANCE
from tests.e2e.harness import CALL_TIMEOUT_S, PATIENT_HANDOFF, Headrace, engine_url, job_token, router_state, split_job
from tests.e2e.leftovers import wait_for_nothing_held
from tests.e2e.traffic import ALL_CLIENTS, COMPLETION, PATHS, Answers, serve

pytestmark = [pytest.mark.stack, pytest.mark.full, pytest.mark.timeout(1800)]

NAME = "mixed-traffic"
ROUTER_PORT = 9433
ROLES = {"prefill": {"replicas": 2}, "decode": {"replicas": 2, "kv_offload": {"cpu": {"num_bytes": 0}}}}
ENGINES = ("prefill-0", "prefill-1", "decode-0", "decode-1")
IN_SESSIONS = [client for client in ALL_CLIENTS if client.session is not None]


@pytest.fixture(scope="module")
def fleet(traffic_reference: Answers, headrace: Headrace, tiny_model: Path) -> Iterator[dict[str, Any]]:
    """The job's status; the reference engine has been stopped before."""
    tables = {"roles": ROLES, "handoff": PATIENT_HANDOFF, "monitoring": {"enabled": False}}
    try:
        yield headrace.up(split_job(NAME, tiny_model, ROUTER_PORT, **tables))
    finally:
        headrace.down(NAME)
        assert headrace.status(NAME)["phase"] == "stopped"


@pytest.fixture(scope="module")
def answers(fleet: dict[str, Any]) -> Answers:
    return asyncio.run(serve(fleet["router"]["url"], anyone_leaves=True))


def test_the_clients_are_a_mixture() -> None:
    assert {client.kind for client in ALL_CLIENTS} == set(PATHS)
    for trait in ("stream", "session", "leaves"):
        having = {client.kind for client in ALL_CLIENTS if getattr(client, trait)}
        assert having == {client.kind for client in ALL_CLIENTS if not getattr(client, trait)} == set(PATHS), trait
    assert {client.kind for client in ALL_CLIENTS if client.samples == 2} == set(PATHS)


def test_every_token_equals_a_colocated_engines(answers: Answers, traffic_reference: Answers) -> None:
    for client in ALL_CLIENTS:
        if client.leaves:
            continue
        for got, wanted in zip(answers[client.number], traffic_reference[client.number], strict=True):
            for one, other in zip(got.samples, wanted.samples, strict=True):
                assert len(one.token_ids) == len(one.logprobs) == COMPLETION, client
                assert one.token_ids == other.token_ids, client
                assert one.text == other.text, client
                assert one.logprobs == pytest.approx(other.logprobs, abs=TOLERANCE), client


def test_who_left_had_the_same_tokens_until_then(answers: Answers, traffic_reference: Answers) -> None:
    leavers = [client for client in ALL_CLIENTS if client.leaves]
    for client in leavers:
        got, wanted = answers[client.number][0], traffic_reference[client.number][0]
        for one, other in zip(got.samples, wanted.samples, strict=True):
            assert one.token_ids == other.token_ids[: len(one.token_ids)], client
    early = [client for client in leavers if len(answers[client.number][0].samples[0].token_ids) < COMPLETION]
    assert {client.stream for client in early} == {True, False}, "nobody has left in the middle"


def test_nothing_is_left_of_it(answers: Answers, fleet: dict[str, Any]) -> None:
    wait_for_nothing_held(fleet)


def test_sessions_end_with_their_request_or_when_finished(answers: Answers, fleet: dict[str, Any]) -> None:
    wait_for_nothing_held(fleet)
    served = [client for client in IN_SESSIONS if not client.leaves]
    # Who has left may not have been heard of.
    assert len(served) <= router_state(fleet)["sessions"] <= len(IN_SESSIONS)
    for client in IN_SESSIONS:
        url = f"{fleet['router']['url']}/finish_session"
        httpx.post(url, json={"session_id": client.session}, timeout=30, trust_env=False).raise_for_status()
    state = router_state(fleet)
    assert state["sessions"] == 0
    assert {replica["name"]: replica["active_sessions"] for replica in state["replicas"]} == dict.fromkeys(ENGINES, 0)


def test_all_four_engines_took_part(answers: Answers) -> None:
    replies = [turn.headers for turns in answers.values() for turn in turns if turn.headers]
    assert {headers[f"x-headrace-{role}"] for headers in replies for role in ("prefill", "decode")} == set(ENGINES)


def test_every_reply_names_the_epoch_and_the_weights(answers: Answers) -> None:
    for turns in answers.values():
        for headers in [turn.headers for turn in turns if turn.headers]:
            assert headers["x-headrace-epoch"] == "1"
            assert headers["x-headrace-weight-version"] == "initial"
            assert headers["x-headrace-single-version"] == "true"


@pytest.mark.parametrize("name", ENGINES)
def test_an_engine_serves_only_its_token_and_epoch(name: str, fleet: dict[str, Any]) -> None:
    """It holds epoch 1, as the router told its clients; whoever brings another one is turned away, and so is who brings
    no token."""
    url, token = engine_url(fleet, name), job_token(fleet)
    body = {"model": "tiny", "prompt": [5] * 40, "max_tokens": 1, "cache_salt": "a-salt"}

    def ask(headers: dict[str, str]) -> httpx.Response:
        return httpx.post(f"{url}/v1/completions", json=body, headers=headers, timeout=CALL_TIMEOUT_S, trust_env=False)

    fence = httpx.get(f"{url}/fence", headers=token, timeout=30, trust_env=False).json()
    assert (fence["epoch"], fence["paused"]) == (1, False)
    right = {"x-headrace-instance": fence["instance"], "x-headrace-epoch": "1", "x-headrace-salted": "1"}
    assert ask(right).status_code == 401
    assert ask({**right, "authorization": "Bearer not-the-token"}).status_code == 401
    refused = ask({**token, **right, "x-headrace-epoch": "2"})
    assert (refused.status_code, refused.json()["error"]["type"]) == (503, "fenced")
    assert "the confirmed epoch is 1" in refused.json()["error"]["message"]
    assert ask({**token, **right}).status_code == 200
