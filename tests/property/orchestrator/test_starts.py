"""Starts in any order of events: stages hold, nothing starts twice, and it settles."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from deploy.unit import LaunchUnit, ListenProbe
from orchestrator.supervisor.reconcile import next_step
from orchestrator.supervisor.state import SeenUnit

TIMEOUT_S = 50.0


def unit(index: int, stage: int) -> LaunchUnit:
    return LaunchUnit(
        name=f"u{index}",
        node="n0",
        argv=("true",),
        probe=ListenProbe(port=1),
        start_stage=stage,
        ready_timeout_s=TIMEOUT_S,
        stop_grace_s=1,
    )


units_of_any_stages = st.lists(st.integers(0, 4), max_size=8).map(
    lambda numbers: tuple(unit(index, stage) for index, stage in enumerate(numbers))
)
any_seen = st.builds(
    SeenUnit,
    started_at=st.sampled_from([0.0, 40.0, 90.0]),
    alive=st.booleans(),
    ready=st.booleans(),
    detail=st.just(""),
    exit_code=st.sampled_from([None, 0, -9]),
)


@given(st.data(), units_of_any_stages)
def test_any_state_has_one_safe_answer(data: st.DataObject, units: tuple[LaunchUnit, ...]) -> None:
    names = [one.name for one in units]
    seen = data.draw(st.dictionaries(st.sampled_from(names), any_seen)) if names else {}
    step = next_step(units, seen, now=100.0)
    assert step == next_step(units, seen, now=100.0)
    by_name = {one.name: one for one in units}
    for name in step.start:
        assert name not in seen
        for lower in (one for one in units if one.start_stage < by_name[name].start_stage):
            assert seen[lower.name].alive
            assert seen[lower.name].ready
    assert len(set(step.start)) == len(step.start)
    bad = {
        name for name, one in seen.items() if not one.alive or (not one.ready and 100.0 - one.started_at > TIMEOUT_S)
    }
    assert (step.failure is not None) == bool(bad)
    if step.failure is not None:
        assert step.failure.unit in bad
        assert step.start == ()
    healthy_and_complete = all(name in seen and seen[name].ready for name in names) and not bad
    assert step.all_ready == healthy_and_complete


@given(st.data(), units_of_any_stages)
def test_a_start_settles_in_whatever_order_units_become_ready(
    data: st.DataObject, units: tuple[LaunchUnit, ...]
) -> None:
    seen: dict[str, SeenUnit] = {}
    for _ in range(2 * len(units) + 1):
        step = next_step(units, seen, now=1.0)
        if step.all_ready:
            break
        for name in step.start:
            assert name not in seen
            seen[name] = SeenUnit(started_at=1.0, alive=True, ready=False, detail="")
        coming = [name for name, one in seen.items() if not one.ready]
        if not step.start:
            name = data.draw(st.sampled_from(coming))
            seen[name] = replace(seen[name], ready=True)
    assert next_step(units, seen, now=1.0).all_ready
    assert set(seen) == {one.name for one in units}
