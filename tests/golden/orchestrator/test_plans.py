"""Whole plans, compared with what is written beside this file.

After a wanted change of plans: `HEADRACE_REWRITE_GOLDEN=1 pytest tests/golden/orchestrator`, then read the difference.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from connectors.types import JsonDict
from orchestrator.plan.build import build_plan
from orchestrator.plan.facts import ClusterFacts
from orchestrator.plan.types import plan_to_json
from orchestrator.spec.load import load_job_file
from tests.unit.orchestrator.samples import facts_of, gpu_facts, node

HERE = Path(__file__).parent
REWRITE = "HEADRACE_REWRITE_GOLDEN"

CLUSTERS: dict[str, ClusterFacts] = {
    "demo": facts_of(),
    "rollouts": gpu_facts(node(0, cores=64, gpus=4, gib=512), node(1, cores=64, gpus=4, gib=512)),
    "colocated": gpu_facts(),
}


def readable(text: str) -> JsonDict:
    """The plan with its JSON files as JSON. Monitoring's files are left to tests/golden/monitoring."""
    plan: JsonDict = json.loads(text)
    for file in plan["files"]:
        if "/monitoring/" in file["path"]:
            del file["text"]
        elif file["path"].endswith(".json"):
            file["text"] = json.loads(file["text"])
    return plan


@pytest.mark.parametrize("name", sorted(CLUSTERS))
def test_plan(name: str) -> None:
    plan = build_plan(load_job_file(HERE / f"{name}.toml"), CLUSTERS[name])
    assert plan.errors == ()
    found = readable(plan_to_json(plan))
    golden = HERE / f"{name}.json"
    if os.environ.get(REWRITE):
        golden.write_text(json.dumps(found, indent=2) + "\n")
    assert found == json.loads(golden.read_text()), f"if this is wanted, set {REWRITE}=1 and run again"
