"""JobSpec + ClusterFacts -> JobPlan. Pure and total: everything that can be decided before a process runs is decided
here, and what must not run comes back as findings.

`resolve.py` and `check.py` come before it, `supervisor/` and the launch backends after. `scale.py` plans a job anew
that runs.
"""

from __future__ import annotations

from dataclasses import replace

from connectors.reference import REFERENCE_ABILITIES
from connectors.types import Choice, EngineAbilities
from orchestrator.errors import Complaint, PlanRefused
from orchestrator.plan.audit import plan_audit
from orchestrator.plan.check import check
from orchestrator.plan.effective import EffectiveRoles, choose_defaults
from orchestrator.plan.engine_units import plan_engines
from orchestrator.plan.facts import ClusterFacts
from orchestrator.plan.front_units import plan_monitoring, plan_router
from orchestrator.plan.memory import memory_findings
from orchestrator.plan.placement import Placement, place
from orchestrator.plan.pool_units import plan_pool
from orchestrator.plan.port_map import PORTS_SETTING, PortBlocks, PortMap, PortsExhausted
from orchestrator.plan.resolve import resolve_roles
from orchestrator.plan.rules_base import CheckInput, error
from orchestrator.plan.rules_network import outgoing_port_findings
from orchestrator.plan.types import Finding, JobPlan
from orchestrator.plan.weights import plan_weights
from orchestrator.spec.job import JobSpec


def build_plan(spec: JobSpec, facts: ClusterFacts, running: JobPlan | None = None) -> JobPlan:
    """The whole plan. Its `errors` say why it must not be started; it can be looked at all the same. Of a job that runs
    already by the plan `running`, engines keep their places and everything its ports.

    Raises:
        PlanRefused: the job file is so wrong that nothing can be laid out (a role's settings do not resolve, a
            replica fits on no node, ports run out).
    """
    abilities = facts.abilities or _reference_abilities(facts)
    resolved = resolve_roles(spec)
    effective = choose_defaults(resolved.roles, facts, abilities)
    can_start = spec.launch.backend in facts.backends
    placement = place(
        effective.roles,
        facts.nodes,
        platform=abilities.platform,
        share_gpus=spec.launch.share_gpus,
        must_fit=can_start,
        standing={engine.name: engine for engine in running.engines} if running else {},
    )
    complaints = (*resolved.complaints, *(placement.complaints if can_start else ()))
    if complaints:
        raise PlanRefused(spec.name, complaints)
    given = CheckInput(spec=spec, roles=effective.roles, placed=placement.engines, facts=facts, abilities=abilities)
    findings = (*check(given), *_no_room(placement))
    try:
        return _lay_out(given, effective, findings, running.ports if running else {})
    except PortsExhausted as exhausted:
        mend = "set ports.base to the start of a longer free range, or stop another job"
        complaint = Complaint(field=PORTS_SETTING, problem=str(exhausted), mend=mend)
        raise PlanRefused(spec.name, [complaint]) from exhausted


def _no_room(placement: Placement) -> tuple[Finding, ...]:
    """Of a plan that is only looked at here: its nodes are not the ones that it would run on."""
    return tuple(error(complaint.field, complaint.problem, complaint.mend) for complaint in placement.complaints)


def _reference_abilities(facts: ClusterFacts) -> EngineAbilities:
    """Where no engine is installed: what the nodes would run."""
    return replace(REFERENCE_ABILITIES, platform="cuda" if any(node.gpus for node in facts.nodes) else "cpu")


def refuse_errors(plan: JobPlan) -> None:
    """Raise `PlanRefused` if the plan must not be started."""
    if plan.errors:
        complaints = [Complaint(field=found.field, problem=found.problem, mend=found.mend) for found in plan.errors]
        raise PlanRefused(plan.job, complaints)


def _lay_out(
    given: CheckInput, effective: EffectiveRoles, findings: tuple[Finding, ...], standing: PortBlocks
) -> JobPlan:
    spec, facts, abilities, roles, placed = given.spec, given.facts, given.abilities, given.roles, given.placed
    ports = PortMap(
        owner="\0".join((spec.name, str(facts.job_dir), facts.socket_dir.name)),
        user_base=spec.ports.base,
        reserved=facts.reserved_ports,
        taken=frozenset({spec.router.port}),
        standing=standing,
    )
    pool = plan_pool(spec, roles, placed, facts, abilities, ports)
    engines = plan_engines(spec, roles, placed, facts, abilities, effective.layout, pool, ports)
    router = plan_router(spec, engines.engines, facts, ports)
    monitoring = plan_monitoring(spec, engines.engines, pool.plan if pool else None, router.plan, facts, ports)
    units = (*(pool.units if pool else ()), *engines.units, router.unit, *monitoring.units)
    found = (
        *memory_findings(given, pool.lenders if pool else ()),
        *findings,
        *outgoing_port_findings(facts, units),
        *_monitoring_findings(spec, facts),
    )
    return JobPlan(
        job=spec.name,
        spec=spec,
        model_name=spec.model.served_names[0] if spec.model.served_names else facts.model.location,
        vllm_version=abilities.vllm_version,
        units=units,
        files=(*engines.files, router.file, *monitoring.files),
        socket_dir=facts.socket_dir,
        engines=engines.engines,
        pool=pool.plan if pool else None,
        router=router.plan,
        weights=plan_weights(spec, facts),
        audit=plan_audit(spec.audit, roles),
        prometheus_url=monitoring.url,
        ports=ports.given,
        offload_probe=spec.checks.offload_probe,
        choices=(*effective.choices, *engines.choices, *_store_choices(spec, pool is not None)),
        findings=tuple(sorted(found, key=lambda finding: finding.severity)),
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
