"""The scrape configuration, whole, and as promtool sees it."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

from monitoring.scrape import Target, TargetRole, engine_targets, prometheus_config

GOLDEN = Path(__file__).parents[2] / "golden" / "monitoring" / "prometheus.yml"
PROMTOOL = shutil.which("promtool")


def target(name: str, role: TargetRole, node: str, address: str) -> Target:
    return Target(name=name, role=role, node=node, address=address, metrics_path="/metrics")


TARGETS = (
    target("router-0", "router", "n1", "10.0.0.1:8000"),
    target("master", "master", "n1", "10.0.0.1:9003"),
    target("prefill-0", "prefill", "n1", "10.0.0.1:8100"),
    target("decode-1", "decode", "n2", "10.0.0.2:8201"),
    target("decode-0", "decode", "n2", "10.0.0.2:8200"),
)


def config(targets: tuple[Target, ...] = TARGETS, interval_s: float = 5) -> str:
    return prometheus_config(
        "swe-rollouts",
        targets,
        ["plan.rules.yml"],
        interval_s,
        engines_file="engines.json",
        engine_token_file="token",
    )


def test_whole_text() -> None:
    assert config() == GOLDEN.read_text()
    assert engine_targets("swe-rollouts", TARGETS) == GOLDEN.with_name("engines.json").read_text()


def test_the_order_of_targets_does_not_matter() -> None:
    assert config(TARGETS[::-1]) == config()
    assert engine_targets("swe-rollouts", TARGETS[::-1]) == engine_targets("swe-rollouts", TARGETS)


def test_a_fast_scrape_keeps_its_fraction() -> None:
    assert yaml.safe_load(config(interval_s=0.25))["global"]["scrape_interval"] == "250ms"


def test_router_targets_leave_role_and_replica_to_the_routers_own_series() -> None:
    scrape_jobs = {job["job_name"]: job.get("static_configs") for job in yaml.safe_load(config())["scrape_configs"]}
    assert not {"role", "replica"} & scrape_jobs["router"][0]["labels"].keys()


def test_only_engines_get_the_jobs_token() -> None:
    scrape_jobs = {job["job_name"]: job.get("authorization") for job in yaml.safe_load(config())["scrape_configs"]}
    engine = {"type": "Bearer", "credentials_file": "token"}
    assert scrape_jobs == {"engine": engine, "master": None, "router": None}


@pytest.mark.skipif(PROMTOOL is None, reason="promtool is not installed")
@pytest.mark.parametrize("targets", [TARGETS, ()], ids=["targets", "no targets"])
def test_promtool_accepts_it(tmp_path: Path, targets: tuple[Target, ...]) -> None:
    path = tmp_path / "prometheus.yml"
    path.write_text(config(targets))
    (tmp_path / "plan.rules.yml").write_text("groups: []\n")
    (tmp_path / "token").write_text("secret\n")
    (tmp_path / "engines.json").write_text(engine_targets("swe-rollouts", targets))
    done = subprocess.run([PROMTOOL, "check", "config", path], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
