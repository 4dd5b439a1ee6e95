"""Targets of a job -> the configuration of its Prometheus.

The plan says which processes expose metrics and where; this module turns that into text, and `stack.py` makes the
command line of the Prometheus that reads it. One scrape job per kind of source, so that `job="engine"` selects all
engines. Those stand in a file of their own, which Prometheus reads again when it changes: replicas come and go.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import yaml

from monitoring.catalogue import JOB_LABEL

TargetRole = Literal["prefill", "decode", "colocated", "master", "router"]
_Kind = Literal["engine", "master", "router"]


@dataclass(frozen=True, kw_only=True)
class Target:
    """One `/metrics` endpoint."""

    name: str
    """The process's name in the plan, unique in the job, e.g. "decode-1"; an engine's is its replica's."""
    role: TargetRole
    node: str
    address: str
    """host:port."""
    metrics_path: str


def prometheus_config(
    job: str,
    targets: Sequence[Target],
    rule_files: Sequence[str],
    scrape_interval_s: float,
    *,
    engines_file: str,
    engine_token_file: str,
) -> str:
    """The text of prometheus.yml for `job`; the same for any order of `targets`.

    `engines_file`: with `engine_targets`. `engine_token_file`: with the bearer token that engines ask for; read anew
    at every scrape.
    """
    interval = f"{round(scrape_interval_s * 1000)}ms"
    config = {
        "global": {"scrape_interval": interval, "scrape_timeout": interval, "evaluation_interval": interval},
        "rule_files": list(rule_files),
        "scrape_configs": [
            {
                "job_name": "engine",
                "file_sd_configs": [{"files": [engines_file]}],
                "authorization": {"type": "Bearer", "credentials_file": engine_token_file},
            },
            {"job_name": "master", "static_configs": _groups("master", job, targets)},
            {"job_name": "router", "static_configs": _groups("router", job, targets)},
        ],
    }
    return yaml.safe_dump(config, sort_keys=False, default_flow_style=False, allow_unicode=True, width=120)


def engine_targets(job: str, targets: Sequence[Target]) -> str:
    """The engines among them, as JSON that `file_sd_configs` takes."""
    return json.dumps(_groups("engine", job, targets), indent=2) + "\n"


def _groups(kind: _Kind, job: str, targets: Sequence[Target]) -> list[dict[str, object]]:
    chosen = sorted((t for t in targets if _kind(t.role) == kind), key=lambda t: t.name)
    return [{"targets": [t.address], "labels": _labels(kind, job, t)} for t in chosen]


def _kind(role: TargetRole) -> _Kind:
    return role if role == "master" or role == "router" else "engine"


def _labels(kind: _Kind, job: str, target: Target) -> dict[str, str]:
    labels = {
        # A process that comes back on another port goes on with its series.
        "instance": target.name,
        JOB_LABEL: job,
        "node": target.node,
        # The path is a property of the target, so that processes of one kind may differ.
        "__metrics_path__": target.metrics_path,
    }
    # The router's own series say which engine they speak of in these two labels; a target label of
    # the same name would rename them to exported_role and exported_replica.
    if kind != "router":
        labels |= {"role": target.role, "replica": target.name}
    return labels
