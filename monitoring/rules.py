"""Prometheus rule files of a job.

The plan comes before; `scrape.py` names the file in the configuration, and the dashboards chart its
series beside the observed ones.
"""

from __future__ import annotations

import yaml

from monitoring.catalogue import JOB_LABEL, PLAN_PREFIX

PLANNED_REPLICAS = 'count by (role) (count by (role, replica) (up{job="engine"}))'
"""Prometheus knows of every engine of the plan, up or not."""


def plan_rules(job: str, pool_bytes: int) -> str:
    """A rule file that publishes the plan as series: what is wanted, to chart beside what is seen. No process has to
    live to expose them."""
    labels = {JOB_LABEL: job}
    rules = [
        {"record": PLAN_PREFIX + "replicas", "expr": PLANNED_REPLICAS, "labels": labels},
        {"record": PLAN_PREFIX + "pool_bytes", "expr": f"vector({pool_bytes})", "labels": dict(labels)},
    ]
    document = {"groups": [{"name": "headrace_plan", "rules": rules}]}
    return yaml.safe_dump(document, sort_keys=False, default_flow_style=False, allow_unicode=True, width=120)
