"""Fixtures of the end-to-end tests: one state folder and one tiny model per session, the reference answers, and a job
that several modules share."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.conversations import Turns, first_turns, second_turns
from tests.e2e.harness import PAIR, PATIENT_HANDOFF, Headrace, job_table, split_job
from tests.e2e.traffic import Answers, serve
from tests.fakes.tiny_model import make_tiny_model

REPOSITORY = Path(__file__).parents[2]
REFERENCE_PORT = 9430
PAIR_ROUTER_PORT = 9434


@pytest.fixture(scope="session")
def tiny_model() -> Path:
    return make_tiny_model(REPOSITORY / ".cache" / "models" / "tiny-qwen3")


@pytest.fixture(scope="session")
def headrace(tmp_path_factory: pytest.TempPathFactory) -> Headrace:
    """A state folder with a space in its path (A34)."""
    return Headrace(tmp_path_factory.mktemp("state of headrace"))


@dataclass(frozen=True)
class Colocated:
    """What one colocated engine without offload answers."""

    turns: Turns
    traffic: Answers | None
    """None where no test of this run asks for it."""


@pytest.fixture(scope="session")
def colocated(request: pytest.FixtureRequest, headrace: Headrace, tiny_model: Path) -> Colocated:
    """All reference answers from one engine: starting it takes longer than they do."""
    table = job_table("reference", tiny_model, REFERENCE_PORT, roles={"colocated": {}}, monitoring={"enabled": False})
    try:
        url = headrace.up(table)["router"]["url"]
        first = first_turns(url)
        turns = Turns(first=first, second=second_turns(url, first))
        wanted = any("traffic_reference" in getattr(item, "fixturenames", ()) for item in request.session.items)
        traffic = asyncio.run(serve(url, anyone_leaves=False)) if wanted else None
        return Colocated(turns=turns, traffic=traffic)
    finally:
        headrace.down("reference")


@pytest.fixture(scope="session")
def reference(colocated: Colocated) -> Turns:
    """The conversations."""
    return colocated.turns


@pytest.fixture(scope="session")
def traffic_reference(colocated: Colocated) -> Answers:
    """The mixed traffic, everybody served to the end."""
    assert colocated.traffic is not None, "nobody asked for it when the run began"
    return colocated.traffic


@pytest.fixture(scope="session")
def pair(headrace: Headrace, tiny_model: Path) -> Iterator[dict[str, Any]]:
    """The status of a running job: one prefill engine, and one decode engine that saves nothing. Its line has no room,
    so that a router that may not serve says so at once.

    Starting engines takes longer than most of what is tested with them, so all modules `test_pair_*.py` use this one,
    one after the other; the last of them kills it.
    """
    roles = {"prefill": {}, "decode": {"kv_offload": {"cpu": {"num_bytes": 0}, "save_decode_cache": False}}}
    router = {"port": PAIR_ROUTER_PORT, "max_waiting": 0}
    try:
        yield headrace.up(
            split_job(PAIR, tiny_model, PAIR_ROUTER_PORT, roles=roles, router=router, handoff=PATIENT_HANDOFF)
        )
    finally:
        headrace.down(PAIR)
