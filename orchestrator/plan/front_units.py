"""The router and the job's Prometheus as launch units, with the files they read."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from pydantic import TypeAdapter

from deploy.unit import HttpProbe, LaunchUnit, ListenPort, PlannedFile
from monitoring.dashboards.overview import overview
from monitoring.rules import plan_rules
from monitoring.scrape import Target, engine_targets, prometheus_config
from monitoring.stack import grafana_provisioning, prometheus_argv
from orchestrator.plan.addresses import token_file, url_host
from orchestrator.plan.engine_units import handoff_lease_s
from orchestrator.plan.facts import ClusterFacts
from orchestrator.plan.kinds import MASTER, PROMETHEUS, ROUTER
from orchestrator.plan.pool_units import STAGE_FRONT
from orchestrator.plan.port_map import PORTS_SETTING, PortMap
from orchestrator.plan.types import EnginePlan, PoolPlan, RouterPlan
from orchestrator.spec.job import ROUTER_DEFAULTS, JobSpec, RouterSpec
from router.settings import (
    TOKEN_FILE_VARIABLE,
    EngineEndpoint,
    PolicySettings,
    RouterSettings,
    StickyLeastLoaded,
)

_POLICY: TypeAdapter[PolicySettings] = TypeAdapter(PolicySettings)

ROUTER_READY_S = 30.0
PROMETHEUS_READY_S = 30.0
DRAIN_SHARE = 0.8
"""Of launch.stop_grace: how long a router that was asked to stop lets open requests finish."""


@dataclass(frozen=True, kw_only=True)
class RouterUnits:
    plan: RouterPlan
    unit: LaunchUnit
    file: PlannedFile


@dataclass(frozen=True, kw_only=True)
class MonitoringUnits:
    url: str | None
    units: tuple[LaunchUnit, ...]
    files: tuple[PlannedFile, ...]


def plan_router(spec: JobSpec, engines: Sequence[EnginePlan], facts: ClusterFacts, ports: PortMap) -> RouterUnits:
    """One router on the head node. It starts frozen; the control plane opens its gate."""
    head = facts.nodes[0]
    one_node = len(facts.nodes) == 1
    # A router that is killed while it drains answers nobody; it must be done before the launcher's patience is.
    drain_s = min(ROUTER_DEFAULTS["shutdown_grace_s"].default, spec.launch.stop_grace * DRAIN_SHARE)
    settings = RouterSettings(
        job=spec.name,
        host=spec.router.host or (head.address if one_node else "0.0.0.0"),
        port=spec.router.port,
        internal_host=head.address,
        internal_port=ports.one(head.name, f"{ROUTER} internal"),
        engines=tuple(EngineEndpoint(name=engine.name, role=engine.role, url=engine.url) for engine in engines),
        policy=_policy(spec.router),
        handoff_lease_s=handoff_lease_s(spec),
        retries=spec.router.retries,
        request_timeout_s=spec.router.request_timeout,
        silence_limit_s=spec.router.silence_limit,
        leg_timeout_s=spec.router.leg_timeout,
        workers=spec.router.workers,
        max_requests=spec.router.max_requests,
        max_legs_per_replica=spec.router.max_requests_per_replica,
        max_waiting=spec.router.max_waiting,
        max_wait_s=spec.router.max_wait,
        readmit_streams=spec.weights is not None and spec.weights.in_flight == "readmit",
        max_body_bytes=spec.router.max_body_bytes,
        skip_prefill_below_tokens=spec.router.skip_prefill_below_tokens,
        audit_share=spec.audit.share,
        audit_kept=spec.audit.kept,
        session_journal=str(facts.job_dir / "sessions.jsonl"),
        shutdown_grace_s=drain_s,
    )
    config = facts.job_dir / "router.json"
    token = str(token_file(facts.job_dir))
    plan = RouterPlan(
        url=f"http://{url_host(_reached_at(settings.host, head.address))}:{settings.port}",
        internal_url=f"http://{url_host(settings.internal_host)}:{settings.internal_port}",
        config_file=str(config),
        token_file=token,
    )
    unit = LaunchUnit(
        name=ROUTER,
        node=head.name,
        # -P: a folder named router where it is started must not be run instead.
        argv=(facts.headrace_python, "-P", "-m", "router.main", "--config", str(config)),
        env={TOKEN_FILE_VARIABLE: token},
        cwd=facts.job_dir,
        ports=(
            ListenPort(name="http", port=settings.port, setting="router.port"),
            ListenPort(name="internal", port=settings.internal_port, setting=PORTS_SETTING),
        ),
        probe=HttpProbe(url=f"{plan.url}/health"),
        start_stage=STAGE_FRONT,
        ready_timeout_s=ROUTER_READY_S,
        stop_grace_s=spec.launch.stop_grace,
    )
    return RouterUnits(
        plan=plan, unit=unit, file=PlannedFile(path=config, text=settings.model_dump_json(indent=2) + "\n")
    )


def _reached_at(host: str, head: str) -> str:
    """Where clients find a router that listens on `host`. A socket on "::" takes IPv6 connections alone."""
    if host == "::":
        return head if ":" in head else "::1"
    return head if host == "0.0.0.0" else host


def _policy(router: RouterSpec) -> PolicySettings:
    sticky = StickyLeastLoaded(session_idle_s=router.session_idle)
    return sticky if router.policy == sticky.type else _POLICY.validate_python({"type": router.policy})


def plan_monitoring(
    spec: JobSpec,
    engines: Sequence[EnginePlan],
    pool: PoolPlan | None,
    router: RouterPlan,
    facts: ClusterFacts,
    ports: PortMap,
) -> MonitoringUnits:
    """Scrape config, plan rules, dashboard and Grafana's provisioning; a Prometheus process where one is installed."""
    if not spec.monitoring.enabled:
        return MonitoringUnits(url=None, units=(), files=())
    folder = facts.job_dir / "monitoring"
    head = facts.nodes[0]
    port = ports.one(head.name, f"{PROMETHEUS} http")
    host = url_host(head.address)
    url = f"http://{host}:{port}"
    interval = spec.monitoring.scrape_interval
    config, rules, engines_file = folder / "prometheus.yml", folder / "plan.rules.yml", folder / "engines.json"
    targets = _targets(engines, pool, router, head.name)
    files = [
        _file(
            config,
            prometheus_config(
                spec.name,
                targets,
                [str(rules)],
                interval,
                engines_file=str(engines_file),
                engine_token_file=router.token_file,
            ),
        ),
        _file(engines_file, engine_targets(spec.name, targets)),
        _file(rules, plan_rules(spec.name, pool.capacity_bytes if pool else 0)),
        _file(folder / "dashboards" / "overview.json", json.dumps(overview(spec.name), indent=2) + "\n"),
    ]
    provisioning = grafana_provisioning(url, str(folder / "dashboards"), interval)
    files += [_file(folder / "grafana" / name, text) for name, text in sorted(provisioning.items())]
    if facts.tools.prometheus is None:
        return MonitoringUnits(url=None, units=(), files=tuple(files))
    unit = LaunchUnit(
        name=PROMETHEUS,
        node=head.name,
        argv=prometheus_argv(
            facts.tools.prometheus, str(config), str(folder / "data"), host, port, spec.monitoring.retention
        ),
        cwd=facts.job_dir,
        ports=(ListenPort(name="http", port=port, setting=PORTS_SETTING),),
        probe=HttpProbe(url=f"{url}/-/ready"),
        start_stage=STAGE_FRONT,
        ready_timeout_s=PROMETHEUS_READY_S,
        stop_grace_s=spec.launch.stop_grace,
    )
    return MonitoringUnits(url=url, units=(unit,), files=tuple(files))


def _targets(engines: Sequence[EnginePlan], pool: PoolPlan | None, router: RouterPlan, head: str) -> list[Target]:
    targets = [
        Target(
            name=engine.name,
            role=engine.role,
            node=engine.node,
            address=urlsplit(engine.url).netloc,
            metrics_path="/metrics",
        )
        for engine in engines
    ]
    if pool is not None and pool.metrics_url is not None:
        master = urlsplit(pool.metrics_url)
        name = MASTER
        targets.append(Target(name=name, role="master", node=head, address=master.netloc, metrics_path=master.path))
    address = urlsplit(router.url).netloc
    targets.append(Target(name=ROUTER, role="router", node=head, address=address, metrics_path="/metrics"))
    return targets


def _file(path: Path, text: str) -> PlannedFile:
    return PlannedFile(path=path, text=text)
