"""What must not be started, found before anything starts: rules over the job file, the facts and what was resolved.

A rule is a function that yields findings, each with the field, the values and the mend; the field cases that it stands
for are in brackets in its text. The rules live by theme in `rules_*.py`. `memory.py` adds the sums per node; what only
a running engine can tell is asked as the job starts, by `supervisor/start.py`.
"""

from __future__ import annotations

from orchestrator.plan import rules_engine, rules_layout, rules_network, rules_pool, rules_weights
from orchestrator.plan.rules_base import CheckInput
from orchestrator.plan.types import Finding

RULES = (
    *rules_engine.RULES,
    *rules_layout.RULES,
    *rules_pool.RULES,
    *rules_network.RULES,
    *rules_weights.RULES,
)


def check(given: CheckInput) -> tuple[Finding, ...]:
    """All findings, errors first."""
    found = dict.fromkeys(finding for rule in RULES for finding in rule(given))
    return tuple(sorted(found, key=lambda finding: finding.severity))
