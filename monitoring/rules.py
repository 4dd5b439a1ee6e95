"""Prometheus rule files of a job.

The plan comes before; `scrape.py` names the file in the configuration, and the dashboards chart its
series beside the observed ones.
"""

from __future__ import annotations

from collections.abc import Mapping

import yaml

from monitoring.catalogue import JOB_LABEL, PLAN_PREFIX


def plan_rules(job: str, planned_replicas: Mapping[str, int], pool_bytes: int) -> str:
    """A rule file that publishes the plan as series: what is wanted, to chart beside what is seen.

    The numbers stand in the rules themselves, so no process has to live to expose them.
    """
    rules = [
        _constant("replicas", replicas, {JOB_LABEL: job, "role": role})
        for role, replicas in sorted(planned_replicas.items())
    ]
    rules.append(_constant("pool_bytes", pool_bytes, {JOB_LABEL: job}))
    document = {"groups": [{"name": "headrace_plan", "rules": rules}]}
    return yaml.safe_dump(document, sort_keys=False, default_flow_style=False, allow_unicode=True, width=120)


def _constant(name: str, value: int, labels: Mapping[str, str]) -> dict[str, object]:
    return {"record": PLAN_PREFIX + name, "expr": f"vector({value})", "labels": dict(labels)}
