"""Wire models of an audit. `headrace audit --json` prints the same."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Literal

from pydantic import Field

from orchestrator.api.examples import AUDIT
from orchestrator.api.wire import WireModel
from orchestrator.weights.agreement import Outcome
from orchestrator.weights.audit import STALE, Audited

MOST_REQUESTS = 1000


class AuditBody(WireModel, json_schema_extra={"examples": [{"requests": 4}]}):
    requests: Annotated[int, Field(ge=1, le=MOST_REQUESTS)] = 4
    """At most so many."""


class JudgementStatus(WireModel):
    outcome: Outcome
    compared: int
    off_by: float
    at: int
    noise: float
    allowed: float


class AuditedStatus(WireModel):
    id: str
    kind: Literal["request", "probe"]
    epoch: int
    version: str
    replicas: dict[str, str]
    prompt_tokens: int | None
    cached_tokens: int | None
    judgement: JudgementStatus | None
    skipped: str
    finding: str
    """Empty where there is nothing wrong."""
    text: str
    """All of the above in words."""
    keys: list[str]
    """In the pool, that hold blocks of the prompt."""
    keys_unknown: str


class AuditStatus(WireModel, json_schema_extra={"examples": [AUDIT]}):
    outcome: Literal["agrees", "disagrees", "unknown"]
    """unknown: nothing could be judged."""
    audited: list[AuditedStatus]


def audit_status(found: Sequence[Audited]) -> AuditStatus:
    audited = [_audited(each) for each in found]
    outcomes = {each.judgement.outcome for each in audited if each.judgement is not None}
    if "disagrees" in outcomes:
        return AuditStatus(outcome="disagrees", audited=audited)
    return AuditStatus(outcome="agrees" if "agrees" in outcomes else "unknown", audited=audited)


def _audited(found: Audited) -> AuditedStatus:
    judgement = found.judgement
    return AuditedStatus(
        id=found.id,
        kind=found.kind,
        epoch=found.epoch,
        version=found.version,
        replicas=dict(found.replicas),
        prompt_tokens=len(found.prompt.token_ids) if found.prompt is not None else None,
        cached_tokens=found.cached_tokens,
        judgement=None if judgement is None else JudgementStatus.model_validate(judgement, from_attributes=True),
        skipped=found.skipped,
        finding=STALE if found.outcome == "disagrees" else "",
        text=str(found),
        keys=list(found.keys),
        keys_unknown=found.keys_unknown,
    )
