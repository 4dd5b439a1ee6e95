"""Findings as a whole: none on a good job, errors first, each once."""

from __future__ import annotations

from typing import Any

import pytest

from connectors.types import JsonDict
from orchestrator.plan.build import refuse_errors
from tests.unit.orchestrator.samples import (
    colocated_data,
    facts_of,
    pd_data,
    plan_of,
    warning_at,
)


def roles(**decode: Any) -> JsonDict:
    return {"roles": {"decode": decode}}


@pytest.mark.parametrize("data", [pd_data(), colocated_data(), pd_data(kv_offload="none", **roles(kv_offload="none"))])
def test_a_good_job_has_no_findings(data: JsonDict) -> None:
    plan = plan_of(data)
    assert plan.findings == ()
    refuse_errors(plan)


def test_no_prometheus_is_a_warning_unless_monitoring_is_off() -> None:
    facts = facts_of(prometheus=None)
    data = pd_data(monitoring={"enabled": True})
    assert "nothing scrapes" in warning_at(plan_of(data, facts), "monitoring.enabled").problem
    assert plan_of(pd_data(), facts).findings == ()


def test_errors_come_first() -> None:
    plan = plan_of(pd_data(pool={"lease_ttl": "1h"}, engine={"port": 1}))
    assert [finding.severity for finding in plan.findings] == ["error", "warning"]


def test_a_mistake_of_the_job_is_told_once_for_all_roles() -> None:
    assert len(plan_of(pd_data(engine={"port": 1})).errors) == 1
