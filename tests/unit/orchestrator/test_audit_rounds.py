"""Jobs are audited as often as they ask for it, each request once."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import pytest

from connectors.pool_client import SaltedPrompt
from orchestrator.audit_rounds import AuditRounds
from orchestrator.errors import AuditFailed
from orchestrator.plan.types import JobPlan
from orchestrator.weights.agreement import judge
from orchestrator.weights.audit import STALE, Audited
from tests.fakes.fake_launch import FakeFleet

WRONG = Audited(
    id="request-1",
    kind="request",
    epoch=3,
    version="step-3",
    replicas={"prefill": "prefill-0", "decode": "decode-0"},
    prompt=SaltedPrompt(token_ids=(1, 2, 3), salt="3.x", key_prefix="job.3@"),
    cached_tokens=2,
    judgement=judge((-1.0,), [(-2.0,), (-2.0,)]),
    keys=("job.3@block",),
)


@pytest.fixture
def fleet(tmp_path: Path) -> FakeFleet:
    return FakeFleet(tmp_path)


@dataclass
class Auditor:
    """Answers in turn, and keeps what it was told to leave out."""

    answers: list[tuple[Audited, ...] | AuditFailed]
    asked: list[frozenset[str]] = field(default_factory=list)

    def __call__(self, plan: JobPlan, most: int, but: frozenset[str]) -> tuple[Audited, ...]:
        assert (plan.job, most) == ("demo", 1)
        self.asked.append(but)
        answer = self.answers.pop(0)
        if isinstance(answer, AuditFailed):
            raise answer
        return answer


def up(fleet: FakeFleet, **audit: float) -> None:
    service = fleet.service()
    service.drive(service.admit(fleet.spec(audit=audit)), fleet.shown.append)


def test_each_request_once_and_errors_are_outlived(fleet: FakeFleet, caplog: pytest.LogCaptureFixture) -> None:
    up(fleet, share=1, every=60)
    auditor = Auditor([(WRONG,), AuditFailed("no answer"), ()])
    rounds = AuditRounds(fleet.store, auditor)
    for now in (0, 59, 60, 61, 120, 180):
        rounds.look(now)
    assert auditor.asked == [frozenset(), frozenset({"request-1"}), frozenset({"request-1"})]
    (said,) = [record.getMessage() for record in caplog.records if record.levelname == "ERROR"]
    assert STALE in said
    assert "job.3@block" in said
    assert any("no answer" in record.getMessage() for record in caplog.records)


def test_what_was_audited_of_a_job_goes_with_it(fleet: FakeFleet) -> None:
    up(fleet, share=1, every=60)
    rounds = AuditRounds(fleet.store, Auditor([(WRONG,), ()]))
    rounds.look(0)
    rounds.look(60)
    fleet.service().stop("demo")
    up(fleet, share=1, every=60)
    rounds.look(61)
    assert [*rounds.rounds["demo"].audited] == [], "it is another run"
    fleet.service().stop("demo")
    rounds.look(62)
    assert rounds.rounds == {}


def test_a_job_that_does_not_ask_is_left_alone(fleet: FakeFleet) -> None:
    up(fleet, share=1)
    auditor = Auditor([])
    rounds = AuditRounds(fleet.store, auditor)
    rounds.look(0)
    rounds.look(10_000)
    assert auditor.asked == []
