"""The router as a process, and what its settings are taken from."""

from __future__ import annotations

import json
from typing import Any

import pytest

from router.settings import TOKEN_FILE_VARIABLE, RouterSettings
from tests.unit.orchestrator.samples import file_text, pd_data, plan_of, unit


def settings_of(**changes: Any) -> RouterSettings:
    return RouterSettings.model_validate_json(file_text(plan_of(pd_data(**changes)), "router.json"))


def test_a_silent_job_file_leaves_the_routers_own_defaults() -> None:
    written = settings_of()
    kept = {"policy", "retries", "request_timeout_s"}
    fields = RouterSettings.model_fields.items()
    required = written.model_dump(include={name for name, info in fields if info.is_required()})
    assert written.model_dump(include=kept) == RouterSettings.model_validate(required).model_dump(include=kept)


@pytest.mark.parametrize("policy", ["sticky_least_loaded", "round_robin"])
def test_policies(policy: str) -> None:
    assert settings_of(router={"policy": policy}).policy.type == policy


@pytest.mark.parametrize(("grace", "drain"), [("5s", 4.0), ("60s", 10.0)])
def test_the_router_has_drained_before_it_is_killed(grace: str, drain: float) -> None:
    assert settings_of(launch={"stop_grace": grace}).shutdown_grace_s == drain


def test_the_router_finds_its_token() -> None:
    plan = plan_of(pd_data())
    assert unit(plan, "router").env[TOKEN_FILE_VARIABLE] == plan.router.token_file
    assert json.loads(file_text(plan, "router.json"))["job"] == "demo"


def test_the_routers_limits_are_the_job_files() -> None:
    said = {"silence_limit": "5m", "leg_timeout": "10m", "max_body_bytes": "64MiB"}
    written = settings_of(router=said)
    assert (written.silence_limit_s, written.leg_timeout_s, written.max_body_bytes) == (300.0, 600.0, 64 << 20)
