from __future__ import annotations

import pytest

from orchestrator.api.access import Access, includes, needed_role
from orchestrator.store.tokens import ROLES, Role


def test_a_token_has_its_role_and_no_other_text_has_one() -> None:
    access = Access({"first": "viewer", "second": "admin"})
    assert access.role_of(b"first") == "viewer"
    assert access.role_of(b"second") == "admin"
    for other in (b"", b"f", b"first ", b"First", b"\xff"):
        assert access.role_of(other) is None
    assert "first" not in repr(vars(access))


def test_nobody_is_known_without_a_token() -> None:
    assert Access({}).role_of(b"") is None
    assert Access({"": "admin"}).role_of(b"") is None


@pytest.mark.parametrize(
    ("method", "path", "role"),
    [
        ("GET", "/health", None),
        ("POST", "/health", None),
        ("GET", "/", None),
        ("GET", "/page/main.js", None),
        ("GET", "/pages", "viewer"),
        ("GET", "/jobs/demo/logs/router", "viewer"),
        ("GET", "/no/such/route", "viewer"),
        ("POST", "/jobs/demo/weights", "trainer"),
        ("DELETE", "/jobs/demo/weights/updates/3", "trainer"),
        ("POST", "/jobs/demo/rlhf/finish_weight_update", "trainer"),
        ("POST", "/operations/demo:1f3c9a2b:update:3/cancel", "trainer"),
        ("POST", "/operations/demo:1f3c9a2b:start/cancel", "admin"),
        ("POST", "/operations/demo:1f3c9a2b:request:3/cancel", "admin"),
        ("POST", "/jobs", "admin"),
        ("POST", "/validate", "admin"),
        ("DELETE", "/jobs/demo", "admin"),
        ("DELETE", "/jobs/weights", "admin"),
        ("POST", "/jobs/demo/audit", "admin"),
        ("POST", "/jobs/demo/weightsx", "admin"),
        ("POST", "/jobs/a/b/weights", "admin"),
        ("OPTIONS", "/jobs", "admin"),
        ("get", "/jobs", "admin"),
    ],
)
def test_the_least_role_for_a_call(method: str, path: str, role: Role | None) -> None:
    assert needed_role(method, path) == role


def test_each_role_includes_those_before_it() -> None:
    assert [[includes(role, needed) for needed in ROLES] for role in ROLES] == [
        [True, False, False],
        [True, True, False],
        [True, True, True],
    ]
