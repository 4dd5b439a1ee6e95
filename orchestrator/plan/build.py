"""JobSpec + ClusterFacts -> JobPlan. Pure and total: everything that can be decided before a process runs is decided
here, and what must not run comes back as findings.

`resolve.py` and `check.py` come before it, `supervisor/` and the launch backends after.
"""

from __future__ import annotations

from dataclasses import replace

from connectors.abilities import REFERENCE_ABILITIES
from connectors.types import Choice, EngineAbilities
from orchestrator.errors import Complaint, PlanRefused
from orchestrator.plan.check import check
from orchestrator.plan.engine_units import plan_engines
from orchestrator.plan.facts import ClusterFacts
from orchestrator.plan.front_units import plan_monitoring, plan_router
from orchestrator.plan.memory import memory_findings
from orchestrator.plan.placement import place
from orchestrator.plan.pool_units import plan_pool
from orchestrator.plan.port_map import PortMap, PortsExhausted
from orchestrator.plan.resolve import resolve_roles
from orchestrator.plan.rules_base import CheckInput
from orchestrator.plan.types import Finding, JobPlan
from orchestrator.spec.job import JobSpec


def build_plan(spec: JobSpec, facts: ClusterFacts) -> JobPlan:
    """The whole plan. Its `errors` say why it must not be started; it can be looked at all the same.

    Raises:
        PlanRefused: the job file is so wrong that nothing can be laid out (a role's settings do not resolve, a
            replica fits on no node, ports run out).
    """
    abilities = facts.abilities or _reference_abilities(facts)
    resolved = resolve_roles(spec)
    placement = place(resolved.roles, facts.nodes, platform=abilities.platform, share_gpus=spec.launch.share_gpus)
    complaints = (*resolved.complaints, *placement.complaints)
    if complaints:
        raise PlanRefused(spec.name, complaints)
    given = CheckInput(spec=spec, roles=resolved.roles, placed=placement.engines, facts=facts, abilities=abilities)
    try:
        return _lay_out(given, check(given))
    except PortsExhausted as error:
        mend = "set ports.base to the start of a longer free range, or stop another job"
        raise PlanRefused(spec.name, [Complaint(field="ports.base", problem=str(error), mend=mend)]) from error


def _reference_abilities(facts: ClusterFacts) -> EngineAbilities:
    """Where no engine is installed: what the nodes would run."""
    return replace(REFERENCE_ABILITIES, platform="cuda" if any(node.gpus for node in facts.nodes) else "cpu")


def refuse_errors(plan: JobPlan) -> None:
    """Raise `PlanRefused` if the plan must not be started."""
    if plan.errors:
        complaints = [Complaint(field=error.field, problem=error.problem, mend=error.mend) for error in plan.errors]
        raise PlanRefused(plan.job, complaints)


def _lay_out(given: CheckInput, findings: tuple[Finding, ...]) -> JobPlan:
    spec, facts, abilities, roles, placed = given.spec, given.facts, given.abilities, given.roles, given.placed
    ports = PortMap(
        job=spec.name,
        user_base=spec.ports.base,
        reserved=facts.reserved_ports,
        taken=frozenset({spec.router.port}),
    )
    pool = plan_pool(spec, roles, placed, facts, abilities, ports)
    engines = plan_engines(spec, roles, placed, facts, abilities, pool, ports)
    router = plan_router(spec, engines.engines, facts, ports)
    monitoring = plan_monitoring(spec, engines.engines, pool.plan if pool else None, router.plan, facts, ports)
    memory = tuple(memory_findings(spec, placed, pool.lenders if pool else (), facts, abilities))
    return JobPlan(
        job=spec.name,
        model_name=spec.model.served_names[0] if spec.model.served_names else facts.model.location,
        vllm_version=abilities.vllm_version,
        units=(*(pool.units if pool else ()), *engines.units, router.unit, *monitoring.units),
        files=(*engines.files, router.file, *monitoring.files),
        engines=engines.engines,
        pool=pool.plan if pool else None,
        router=router.plan,
        prometheus_url=monitoring.url,
        port_span=ports.span,
        offload_probe=spec.checks.offload_probe,
        choices=(*engines.choices, *_store_choices(spec, pool is not None)),
        findings=(*memory, *findings, *_monitoring_findings(spec, facts)),
    )


def _store_choices(spec: JobSpec, has_pool: bool) -> tuple[Choice, ...]:
    if not has_pool:
        return ()
    if spec.pool.protocol == "rdma":
        return (Choice(subject="store transport", value="rdma", reason="pool.protocol"),)
    reason = "larger slices over pooled connections in 8 lanes doubled the load rate of Mooncake's tcp"
    return (Choice(subject="store transport", value="tcp, tuned", reason=reason),)


def _monitoring_findings(spec: JobSpec, facts: ClusterFacts) -> tuple[Finding, ...]:
    if not spec.monitoring.enabled or facts.tools.prometheus is not None:
        return ()
    problem = "no prometheus program is installed here; the scrape config and dashboard are written, nothing scrapes"
    return (
        Finding(
            severity="warning",
            field="monitoring.enabled",
            problem=problem,
            mend="install prometheus (Debian package of that name), or set monitoring.enabled = false",
        ),
    )
