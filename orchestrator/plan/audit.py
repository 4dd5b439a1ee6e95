"""What an audit has to know of a job: how often it is made unasked, and what its engines make of a prompt.

`weights/audit.py` makes it, once a job serves.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from connectors.engine_argv import SHARED_LAYOUT_ARGUMENTS
from orchestrator.plan.resolve import RoleConfig
from orchestrator.spec.job import AuditSpec

_HASH = "prefix_caching_hash_algo"
_DEFAULT_HASH = str(SHARED_LAYOUT_ARGUMENTS[_HASH])
_MODE, _RAW = "logprobs_mode", "raw_logprobs"


@dataclass(frozen=True, kw_only=True)
class AuditPlan:
    every_s: float | None
    """None: only when somebody asks for it."""
    hash_algorithm: str
    """Of the engines' block hashes."""
    impossible: str | None
    """Why this job's replies can't be audited."""


def plan_audit(audit: AuditSpec, roles: Sequence[RoleConfig]) -> AuditPlan:
    processed = [role.role for role in roles if role.engine.get(_MODE, _RAW) != _RAW]
    why = f"engine.{_MODE}: what engines tell depends on how a request is sampled, so replays can't be compared with it"
    return AuditPlan(
        every_s=audit.every,
        # Engines that share a pool have the same one.
        hash_algorithm=next((str(role.engine[_HASH]) for role in roles if _HASH in role.engine), _DEFAULT_HASH),
        impossible=f"{why}; it has to be {_RAW!r} on {', '.join(processed)}" if processed else None,
    )
