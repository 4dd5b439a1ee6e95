"""Every job file that is shipped loads, and is planned without an error on machines that fit it. Whatever process of it
ends is started again."""

from __future__ import annotations

from pathlib import Path

import pytest

from orchestrator.plan.build import build_plan
from orchestrator.plan.kinds import kinds_of
from orchestrator.plan.types import plan_from_json, plan_to_json
from orchestrator.spec.load import load_job_file
from orchestrator.store.keeping import UnitEnd
from orchestrator.supervisor.restarts import row_of
from orchestrator.supervisor.upkeep import UnitSight, upkeep
from tests.unit.orchestrator.samples import facts_of, gpu_facts, node

EXAMPLES = sorted((Path(__file__).parents[3] / "deploy" / "examples").rglob("*.toml"))
CLUSTER = tuple(node(index, cores=64, gpus=8, gib=2048) for index in range(12))


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_example(path: Path) -> None:
    spec = load_job_file(path)
    facts = facts_of() if spec.engine.get("dtype") == "float32" else gpu_facts(*CLUSTER)
    plan = build_plan(spec, facts)
    assert plan.errors == ()
    assert plan_from_json(plan_to_json(plan)) == plan
    engines = sum(role.replicas for role in (spec.roles.prefill, spec.roles.decode, spec.roles.colocated) if role)
    assert len(plan.engines) == engines
    kinds = kinds_of(plan)
    assert set(kinds) == {unit.name for unit in plan.units}
    for ended in kinds:
        sights = [
            UnitSight(
                name=name,
                kind=kind,
                state="ended" if name == ended else "ready",
                is_replaced=False,
                row=row_of(kind, [UnitEnd(at=0.0, ready_s=60.0, cause="")] if name == ended else []),
            )
            for name, kind in kinds.items()
        ]
        assert upkeep(sights, 1.0).start == (ended,)
