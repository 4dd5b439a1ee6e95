from pathlib import Path

import pytest

from deploy.local.bootstrap import ROOT
from deploy.local.demo import JOB, JOB_FILE
from orchestrator.plan.resolve import resolve_roles
from orchestrator.spec.load import load_job_file

EXAMPLES = sorted((ROOT / "deploy" / "examples").glob("*.toml"))


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.name)
def test_every_example_is_a_job(path: Path) -> None:
    spec = load_job_file(path)
    assert resolve_roles(spec).complaints == ()


def test_the_demo_uses_the_model_that_the_setup_makes() -> None:
    spec = load_job_file(ROOT / JOB_FILE)
    assert spec.name == JOB
    assert f"MODEL := {spec.model.path}\n" in (ROOT / "Makefile").read_text()
