"""What each role may call: every route of the OpenAPI document, with every kind of token."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi import FastAPI

from orchestrator.api.access import Access
from orchestrator.api.server import build_app
from tests.fakes.fake_launch import FakeFleet

TOKENS = {"v-token": "viewer", "t-token": "trainer", "a-token": "admin"}


@pytest.fixture
def app(tmp_path: Path) -> FastAPI:
    return build_app(FakeFleet(tmp_path).service(), Access(TOKENS))


@pytest.mark.parametrize("token", [None, "wrong", *TOKENS])
def test_every_route(app: FastAPI, serve: Callable[[Any], httpx.Client], token: str | None) -> None:
    client = serve(app)
    headers = {"authorization": f"Bearer {token}"} if token else {}
    may = {"v-token": 1, "t-token": 2, "a-token": 3}.get(token or "", 0)
    for path, methods in app.openapi()["paths"].items():
        for method in methods:
            concrete = path.replace("{name}", "nobody").replace("{number}", "1").replace("{process}", "router")
            body = {} if method == "post" else None
            # A stream of events would never end.
            with client.stream(method, concrete, headers=headers, json=body) as reply:
                pass
            takes = 1 if method == "get" else 2 if "/weights" in path or "/rlhf" in path else 3
            if path == "/health":
                assert reply.status_code == 200
            elif not may:
                assert (reply.status_code, reply.headers["www-authenticate"]) == (401, "Bearer")
            else:
                assert (reply.status_code == 403) == (may < takes), (method, path)
                assert reply.status_code != 401


def test_a_refusal_says_what_it_takes(app: FastAPI, serve: Callable[[Any], httpx.Client]) -> None:
    reply = serve(app).delete("/jobs/demo", headers={"authorization": "Bearer t-token"})
    assert reply.headers["content-type"] == "application/problem+json"
    assert reply.json()["detail"] == "this takes a token with the role admin, and yours is trainer"
