from __future__ import annotations

from typing import Any

import pytest

from orchestrator.spec.difference import differences, spec_hash
from tests.unit.orchestrator.samples import pd_data, spec_of


@pytest.mark.parametrize(
    "same",
    [
        {"router": {"port": 8000}},
        {"pool": {"lease_ttl": "1m"}},
        {"router": {}},
        {"ports": {"base": None}},
    ],
)
def test_what_is_said_otherwise_and_means_the_same(same: dict[str, Any]) -> None:
    recorded, asked = spec_of(pd_data()), spec_of(pd_data(**same))
    assert differences(recorded, asked) == ()
    assert spec_hash(recorded) == spec_hash(asked)


@pytest.mark.parametrize(
    ("changes", "field", "problem"),
    [
        ({"router": {"port": 9000}}, "router.port", "is not set in the recorded job, and 9000 here"),
        ({"kv_offload": {"cpu": {"num_bytes": "1GiB"}}}, "kv_offload.cpu.num_bytes", 'is "256MiB" in the recorded'),
        ({"roles": {"colocated": {}}}, "roles.colocated", "is not set in the recorded job, and {} here"),
        ({"weights": {}}, "weights", "is not set in the recorded job, and {} here"),
        ({"engine": {"hf_overrides": {"a": [1]}}}, "engine.hf_overrides.a", "and [1] here"),
        ({"env": {"A_TOKEN": "x" * 9}}, "env.A_TOKEN", 'and "(left out)" here'),
        ({"engine": {"chat_template": "y" * 999}}, "engine.chat_template", "yyy... here"),
    ],
)
def test_what_means_something_else(changes: dict[str, Any], field: str, problem: str) -> None:
    recorded, asked = spec_of(pd_data()), spec_of(pd_data(**changes))
    (found,) = differences(recorded, asked)
    assert found.field == field
    assert problem in found.problem
    assert spec_hash(recorded) != spec_hash(asked)
    assert len(differences(asked, recorded)) == 1
