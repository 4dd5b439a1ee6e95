"""What a router client makes of answers that no router of this version gives."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from orchestrator.observe.outside import replicas_of
from orchestrator.plan.types import JobPlan
from orchestrator.weights.router_client import RouterCallFailed, RouterClient
from orchestrator.weights.words import Order
from tests.fakes.fake_launch import FakeFleet

ORDER = Order(1, 1, 1)
CALLS: dict[str, Callable[[RouterClient], object]] = {
    "state": RouterClient.state,
    "traffic": RouterClient.traffic,
    "newest_order": RouterClient.newest_order,
    "replicas": RouterClient.replicas,
    "finished": RouterClient.finished,
    "drain": lambda router: router.drain("decode-0", ORDER, draining=True, timeout_s=0.1),
}
OTHER_REPLICAS = b'{"gate": "open", "order": [1, 1], "replicas": [{"name": "decode-0"}], "requests": [{}]}'
ANSWERS = [b"{}", b"[]", b"null", b"<html>", b"\xff", b"[" * 10_000, OTHER_REPLICAS]


@pytest.fixture
def answering(tmp_path: Path, serve: Callable[[Any], httpx.Client]) -> Callable[[bytes], JobPlan]:
    """A job whose router gives one answer to all calls."""

    def put(body: bytes) -> JobPlan:
        async def app(scope: Any, receive: Any, send: Any) -> None:
            await send({"type": "http.response.start", "status": 200, "headers": []})
            await send({"type": "http.response.body", "body": body})

        plan, token = FakeFleet(tmp_path).plan(), tmp_path / "token"
        token.write_text("secret")
        router = replace(plan.router, internal_url=str(serve(app).base_url), token_file=str(token))
        return replace(plan, router=router)

    return put


@pytest.mark.parametrize("answer", ANSWERS)
@pytest.mark.parametrize("call", CALLS)
def test_an_answer_that_does_not_fit_is_none(answering: Callable[[bytes], JobPlan], call: str, answer: bytes) -> None:
    plan = answering(answer)
    with RouterClient(plan.router) as router, pytest.raises(RouterCallFailed):
        CALLS[call](router)
    assert replicas_of(plan) is None
