"""The plan as recording rules, whole, and as promtool sees it."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

from monitoring.catalogue import BY_NAME, JOB_LABEL
from monitoring.rules import plan_rules

GOLDEN = Path(__file__).parents[2] / "golden" / "monitoring" / "plan.rules.yml"
PROMTOOL = shutil.which("promtool")

TEXT = plan_rules("swe-rollouts", 12 << 40)


def test_whole_text() -> None:
    assert GOLDEN.read_text() == TEXT


def test_the_catalogue_describes_what_is_recorded() -> None:
    for rule in yaml.safe_load(TEXT)["groups"][0]["rules"]:
        metric = BY_NAME[rule["record"]]
        assert metric.source == "plan"
        assert rule["labels"].keys() == {JOB_LABEL}
        assert all(f"by ({label})" in rule["expr"] for label in metric.labels)


@pytest.mark.skipif(PROMTOOL is None, reason="promtool is not installed")
@pytest.mark.parametrize("text", [TEXT, plan_rules('odd: "name" #{{', 0)], ids=["a pool", "odd name, no pool"])
def test_promtool_accepts_it(tmp_path: Path, text: str) -> None:
    path = tmp_path / "plan.rules.yml"
    path.write_text(text)
    done = subprocess.run([PROMTOOL, "check", "rules", path], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
