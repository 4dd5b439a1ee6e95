"""The plan of a running job with another number of replicas of one role. Pure.

What stays is planned as it runs, byte for byte: same ports, GPUs and arguments. `replica_service.py` asks for it,
`replica_keeper.py` puts it in the place of the plan before.
"""

from __future__ import annotations

from dataclasses import replace

from connectors.types import Role
from orchestrator.errors import Complaint, PlanRefused
from orchestrator.plan.build import build_plan, refuse_errors
from orchestrator.plan.facts import ClusterFacts
from orchestrator.plan.types import JobPlan
from orchestrator.spec.difference import asked_for
from orchestrator.spec.job import JobSpec
from orchestrator.spec.load import job_from_data

LISTS = ("router.json", "engines.json")
"""Files that list the engines."""


def with_replicas(spec: JobSpec, role: Role, replicas: int) -> JobSpec:
    """Raises `SpecError` where a job file must not say so."""
    data = asked_for(spec)
    data["roles"][role]["replicas"] = replicas
    return job_from_data(data, source=f"job {spec.name!r} with roles.{role}.replicas = {replicas}")


def replicas_of(plan: JobPlan, role: Role) -> tuple[str, ...]:
    """Names, in the order in which they were added."""
    return tuple(engine.name for engine in plan.engines if engine.role == role)


def scaled_plan(running: JobPlan, role: Role, replicas: int, facts: ClusterFacts) -> JobPlan:
    """The replicas that were planned last go first.

    Raises:
        SpecError, PlanRefused: more of them cannot run here; or a new one would not be like those that run.
    """
    _refuse_moved(running, role, facts)
    # Folders for temporary files may have moved since.
    facts = replace(facts, socket_dir=running.socket_dir)
    fresh = build_plan(with_replicas(running.spec, role, replicas), facts, running)
    if replicas > len(replicas_of(running, role)):
        refuse_errors(fresh)
        _refuse_unlike(running, fresh, role)
    units = {unit.name: unit for unit in running.units}
    engines = {engine.name: engine for engine in running.engines}
    files = {file.path: file for file in running.files if file.path.name not in LISTS}
    return replace(
        fresh,
        vllm_version=running.vllm_version,
        files=tuple(files.get(file.path, file) for file in fresh.files),
        units=tuple(units.get(unit.name, unit) for unit in fresh.units),
        engines=tuple(engines.get(engine.name, engine) for engine in fresh.engines),
        pool=running.pool,
    )


def _refuse_moved(running: JobPlan, role: Role, facts: ClusterFacts) -> None:
    """What runs is on nodes as they were called when it was started."""
    known = [node.name for node in facts.nodes]
    if gone := sorted({engine.node for engine in running.engines} - {*known}):
        problem = f"engines run on {', '.join(gone)}, and the nodes are called {', '.join(known)} now"
        mend = f"stop the job with `headrace down {running.job}` and start it with so many"
        raise PlanRefused(running.job, [Complaint(field=f"roles.{role}.replicas", problem=problem, mend=mend)])


def _refuse_unlike(running: JobPlan, fresh: JobPlan, role: Role) -> None:
    """The file of a role has all that its engines have in common, the name of the pool's keys included."""
    name = f"inference-{role}.json"
    before, after = (next(file.text for file in plan.files if file.path.name == name) for plan in (running, fresh))
    if before != after or running.vllm_version != fresh.vllm_version:
        problem = "the engine or the model's files have changed since the job was started: a new replica would not be"
        mend = f"stop it with `headrace down {running.job}` and start it with so many"
        field = f"roles.{role}.replicas"
        raise PlanRefused(running.job, [Complaint(field=field, problem=f"{problem} like those that run", mend=mend)])
