from __future__ import annotations

from pathlib import Path

import pytest

from deploy.local.request import child_environment
from deploy.unit import LaunchUnit, ListenProbe, RunContext

RUN = RunContext(job="job", run_id="r1", log_dir=Path("/logs"))


def unit(unset_env: tuple[str, ...], env: dict[str, str]) -> LaunchUnit:
    return LaunchUnit(
        name="u",
        node="n",
        argv=("/bin/true",),
        env=env,
        unset_env=unset_env,
        probe=ListenProbe(port=1),
        start_stage=0,
        ready_timeout_s=1.0,
        stop_grace_s=1.0,
    )


@pytest.mark.parametrize(
    ("unset", "left"),
    [
        ((), {"UCX_TLS", "UCX", "RANK", "MY_RANK"}),
        (("UCX_*",), {"UCX", "RANK", "MY_RANK"}),
        (("RANK",), {"UCX_TLS", "UCX", "MY_RANK"}),
        (("*_RANK", "R?NK"), {"UCX_TLS", "UCX", "RANK", "MY_RANK"}),
    ],
)
def test_what_is_taken_out_of_the_launching_environment(unset, left):
    base = dict.fromkeys(("UCX_TLS", "UCX", "RANK", "MY_RANK"), "1")
    seen = child_environment(base, RUN, unit(unset, {}))
    assert set(seen) - {"HEADRACE_RUN_ID", "HEADRACE_UNIT"} == left


def test_what_a_unit_sets_stays_set():
    assert child_environment({"UCX_A": "1"}, RUN, unit(("UCX_*",), {"UCX_A": "2"}))["UCX_A"] == "2"
