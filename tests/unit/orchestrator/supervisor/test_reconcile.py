"""What comes next of a start, from what is seen."""

from __future__ import annotations

import pytest

from deploy.unit import LaunchUnit, ListenProbe
from orchestrator.supervisor.reconcile import Step, UnitFailure, next_step
from orchestrator.supervisor.state import SeenUnit

NOW = 500.0


def unit(name: str, stage: int, *, timeout_s: float = 60) -> LaunchUnit:
    return LaunchUnit(
        name=name,
        node="n0",
        argv=("true",),
        probe=ListenProbe(port=1),
        start_stage=stage,
        ready_timeout_s=timeout_s,
        stop_grace_s=1,
    )


UNITS = (unit("master", 0), unit("client", 1), unit("prefill-0", 1), unit("router", 2))


def seen(*, ready: bool = False, alive: bool = True, age_s: float = 1, code: int | None = None) -> SeenUnit:
    detail = "GET /health: 503"
    return SeenUnit(started_at=NOW - age_s, alive=alive, ready=ready, detail=detail, exit_code=code)


READY = seen(ready=True)
COMING = seen()


@pytest.mark.parametrize(
    ("state", "step"),
    [
        pytest.param({}, Step(start=("master",)), id="nothing yet"),
        pytest.param({"master": COMING}, Step(), id="first stage comes up"),
        pytest.param({"master": READY}, Step(start=("client", "prefill-0")), id="a whole stage at once"),
        pytest.param({"master": READY, "client": COMING}, Step(start=("prefill-0",)), id="only what is missing"),
        pytest.param({"master": READY, "client": READY, "prefill-0": COMING}, Step(), id="one is awaited"),
        pytest.param(
            {"master": READY, "client": READY, "prefill-0": READY}, Step(start=("router",)), id="the last stage"
        ),
        pytest.param({one.name: READY for one in UNITS}, Step(all_ready=True), id="all ready"),
        pytest.param(
            {"master": seen(alive=False, ready=True, age_s=90, code=-9), "client": COMING},
            Step(failure=UnitFailure(unit="master", what="ended by signal 9 after 90 s")),
            id="one that was ready died",
        ),
        pytest.param(
            {"master": READY, "client": seen(alive=False, code=3)},
            Step(failure=UnitFailure(unit="client", what="ended with exit code 3 after 1 s")),
            id="one died, its stage is incomplete",
        ),
        pytest.param(
            {"master": seen(alive=False)},
            Step(failure=UnitFailure(unit="master", what="ended after 1 s")),
            id="died, and another process was its parent",
        ),
        pytest.param(
            {"master": seen(age_s=61)},
            Step(failure=UnitFailure(unit="master", what="was not ready within 60 s (GET /health: 503)")),
            id="used up its time",
        ),
        pytest.param({"master": seen(age_s=60)}, Step(), id="has exactly its time left to show"),
        pytest.param({"master": seen(age_s=9999, ready=True)}, Step(start=("client", "prefill-0")), id="old but ready"),
        pytest.param(
            {"master": READY, "prefill-0": seen(alive=False), "client": seen(alive=False)},
            Step(failure=UnitFailure(unit="client", what="ended after 1 s")),
            id="the first in plan order is named",
        ),
    ],
)
def test_next_step(state: dict[str, SeenUnit], step: Step) -> None:
    assert next_step(UNITS, state, NOW) == step


def test_a_probe_without_words_leaves_no_brackets() -> None:
    silent = SeenUnit(started_at=NOW - 61, alive=True, ready=False, detail="")
    failure = next_step(UNITS, {"master": silent}, NOW).failure
    assert failure == UnitFailure(unit="master", what="was not ready within 60 s")


def test_a_plan_without_units_is_ready() -> None:
    assert next_step((), {}, NOW) == Step(all_ready=True)
