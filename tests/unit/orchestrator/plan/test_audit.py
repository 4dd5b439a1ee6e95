"""What an audit gets to know of a job."""

from __future__ import annotations

from orchestrator.plan.audit import AuditPlan
from router.settings import RouterSettings
from tests.unit.orchestrator.samples import file_text, pd_data, plan_of


def test_nothing_is_kept_or_audited_unasked() -> None:
    plan = plan_of(pd_data())
    assert plan.audit == AuditPlan(every_s=None, hash_algorithm="sha256", impossible=None)
    assert RouterSettings.model_validate_json(file_text(plan, "router.json")).audit_share == 0


def test_what_a_job_file_asks_for() -> None:
    engine = {"block_size": 32, "prefix_caching_hash_algo": "sha256_cbor"}
    plan = plan_of(pd_data(audit={"share": 0.5, "kept": 3, "every": "5m"}, engine=engine))
    assert plan.audit == AuditPlan(every_s=300.0, hash_algorithm="sha256_cbor", impossible=None)
    settings = RouterSettings.model_validate_json(file_text(plan, "router.json"))
    assert (settings.audit_share, settings.audit_kept) == (0.5, 3)


def test_log_probabilities_that_depend_on_the_sampling_cannot_be_compared() -> None:
    plan = plan_of(pd_data(engine={"block_size": 32, "logprobs_mode": "processed_logprobs"}))
    assert plan.audit.impossible is not None
    assert "raw_logprobs" in plan.audit.impossible
