"""Small builders of job files, facts and plans, for the tests of spec, plan and connectors."""

from __future__ import annotations

import json
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from connectors.layout import Attention
from connectors.reference import REFERENCE_ABILITIES
from connectors.types import EngineAbilities, JsonDict
from deploy.unit import LaunchUnit
from orchestrator.errors import PlanRefused
from orchestrator.plan.build import build_plan, refuse_errors
from orchestrator.plan.facts import ClusterFacts, ModelFacts, NodeFacts, Tools
from orchestrator.plan.resolve import deep_merge
from orchestrator.plan.types import Finding, JobPlan
from orchestrator.spec.job import JobSpec
from orchestrator.spec.load import job_from_data

GIB = 2**30
MODEL = "/models/small"

CPU = replace(REFERENCE_ABILITIES, python="/venv/bin/python", platform="cpu")
"""vLLM 0.32 on a CPU."""
GPU = replace(REFERENCE_ABILITIES, python="/venv/bin/python")
"""vLLM 0.32 on GPUs."""
GPU_OLD = replace(
    GPU,
    vllm_version="0.25.1",
    save_decode_cache=False,
    kv_cache_layouts=(),
    cross_layers_blocks=True,
    scale_out_flag=False,
)
"""vLLM 0.25.1: cross-layer blocks, no decode saving, no named layouts, no flag for the token route."""

BARE: JsonDict = {"model": {"path": MODEL}, "monitoring": {"enabled": False}}
"""Without monitoring: its dashboards are most of the time that a plan takes, and have tests of their own."""

MOONCAKE: JsonDict = {"type": "mooncake", "cpu": {"num_bytes": "256MiB"}}


def pd_data(**changes: Any) -> JsonDict:
    """A prefill/decode job: prefill lends 256 MiB, decode joins with nothing. `changes` are merged in."""
    base: JsonDict = {
        **BARE,
        "name": "demo",
        "kv_offload": MOONCAKE,
        "roles": {"prefill": {}, "decode": {"kv_offload": {"cpu": {"num_bytes": 0}}}},
    }
    return deepcopy(deep_merge(base, changes))


def colocated_data(**changes: Any) -> JsonDict:
    base: JsonDict = {**BARE, "name": "plain", "kv_offload": MOONCAKE, "roles": {"colocated": {}}}
    return deepcopy(deep_merge(base, changes))


def spec_of(data: JsonDict) -> JobSpec:
    return job_from_data(data, source="test")


def node(index: int = 0, *, cores: int = 2, gpus: int = 0, gib: float = 24, address: str | None = None) -> NodeFacts:
    return NodeFacts(
        name=f"n{index}",
        address=address or f"10.0.0.{index + 1}",
        cores=tuple(range(cores)),
        gpus=gpus,
        memory_bytes=int(gib * GIB),
        nvlink=None,
    )


def facts_of(
    *nodes: NodeFacts,
    abilities: EngineAbilities | None = CPU,
    attention: Attention = "full",
    fingerprint: str = "f00d",
    weight_bytes: int = GIB // 2,
    is_folder: bool = True,
    quantization: str | None = None,
    prometheus: str | None = "/usr/bin/prometheus",
    job_dir: str = "/jobs/demo",
    reserved_ports: frozenset[int] = frozenset(),
) -> ClusterFacts:
    """One node on loopback with two cores, unless nodes are given."""
    return ClusterFacts(
        backends=("local",),
        nodes=nodes or (node(address="127.0.0.1"),),
        abilities=abilities,
        engine_missing="" if abilities else "/venv/bin/python has no vllm installed",
        model=ModelFacts(
            location=MODEL,
            is_folder=is_folder,
            fingerprint=fingerprint,
            weight_bytes=weight_bytes,
            attention=attention,
            quantization=quantization,
        ),
        tools=Tools(prometheus=prometheus),
        job_dir=Path(job_dir),
        socket_dir=Path("/tmp/hr-demo"),
        headrace_python="/headrace/bin/python",
        reserved_ports=reserved_ports,
    )


def gpu_facts(*nodes: NodeFacts, **changes: Any) -> ClusterFacts:
    """One node on loopback with eight GPUs, unless nodes are given."""
    changes.setdefault("abilities", GPU)
    return facts_of(*(nodes or (node(cores=64, gpus=8, gib=1024, address="127.0.0.1"),)), **changes)


def plan_of(data: JsonDict, facts: ClusterFacts | None = None) -> JobPlan:
    return build_plan(spec_of(data), facts or facts_of())


def unit(plan: JobPlan, name: str) -> LaunchUnit:
    return next(unit for unit in plan.units if unit.name == name)


def argument(plan: JobPlan, engine: str, flag: str) -> str | None:
    """What follows `flag` on the engine's command line; "" for a bare flag, None where it is missing."""
    argv = unit(plan, engine).argv
    if flag not in argv:
        return None
    after = argv[argv.index(flag) + 1 :]
    return after[0] if after and not after[0].startswith("--") else ""


def transfer(plan: JobPlan, engine: str) -> JsonDict | None:
    text = argument(plan, engine, "--kv-transfer-config")
    return None if text is None else dict(json.loads(text))


def connector_names(config: JsonDict | None) -> list[str]:
    if config is None:
        return []
    children = config["kv_connector_extra_config"].get("connectors")
    return [child["kv_connector"] for child in children or [config]]


def file_text(plan: JobPlan, name: str) -> str:
    return next(file.text for file in plan.files if file.path.name == name)


def error_at(plan: JobPlan, field: str) -> Finding:
    """The one error about `field`."""
    found = [finding for finding in plan.errors if finding.field == field]
    assert len(found) == 1, f"errors: {[(error.field, error.problem) for error in plan.errors]}"
    return found[0]


def warning_at(plan: JobPlan, field: str) -> Finding:
    found = [finding for finding in plan.findings if (finding.severity, finding.field) == ("warning", field)]
    assert len(found) == 1, f"findings: {[(finding.field, finding.problem) for finding in plan.findings]}"
    return found[0]


def assert_error(data: JsonDict, field: str, *says: str, facts: ClusterFacts | None = None) -> None:
    """One error about `field`, in whose text and mend each of `says` stands; and the plan is refused."""
    plan = plan_of(data, facts)
    found = error_at(plan, field)
    for word in says:
        assert word in f"{found.problem}; {found.mend}"
    assert found.mend
    with pytest.raises(PlanRefused, match="cannot run"):
        refuse_errors(plan)
