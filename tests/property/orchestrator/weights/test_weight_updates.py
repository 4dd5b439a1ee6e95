"""Whatever fails in an update of the weights, no engine serves weights of another epoch, and it ends."""

from __future__ import annotations

from random import Random

import pytest
from hypothesis import given, note, settings
from hypothesis import strategies as st

from connectors.types import Role
from orchestrator.spec.weights import InFlightMode, Strategy
from tests.property.orchestrator.weights.world import ALL_FAULTS, NO_FAULTS, Faults, World

# Seconds of computing, which may take a minute beside engines.
pytestmark = pytest.mark.timeout(300)

FLEETS: list[list[Role]] = [
    ["prefill", "prefill", "decode", "decode"],
    ["prefill", "prefill", "decode", "decode", "decode"],
    ["colocated", "colocated"],
    ["prefill", "decode"],
]
STRATEGIES: list[Strategy] = ["barrier", "rolling"]
MODES: list[InFlightMode] = ["readmit", "wait", "abort", "keep"]


def run(
    roles: list[Role],
    random: Random,
    faults: Faults,
    *,
    modes: list[InFlightMode] = MODES,
    updates: int = 2,
    things: int = 150,
) -> World:
    world = World(roles, random, faults)
    try:
        for number in range(1, updates + 1):
            world.ask(f"v{number}", random.choice(STRATEGIES), random.choice(modes), prefetch=random.random() < 0.5)
            for _ in range(things):
                world.happen()
        world.settle()
        world.check_settled()
    except AssertionError:
        note("\n".join(world.story))
        raise
    return world


@given(st.sampled_from(FLEETS), st.integers(0, 2**32))
@settings(max_examples=150)
def test_any_failure_leaves_a_whole_fleet(roles: list[Role], seed: int) -> None:
    run(roles, Random(seed), ALL_FAULTS)


@given(st.sampled_from(FLEETS), st.integers(0, 2**32))
@settings(max_examples=100)
def test_a_coordinator_that_dies_anywhere_ends_what_it_began(roles: list[Role], seed: int) -> None:
    run(roles, Random(seed), Faults(coordinator_dies=True))


@given(st.sampled_from(FLEETS), st.integers(0, 2**32))
@settings(max_examples=100)
def test_lost_answers_and_failed_loads(roles: list[Role], seed: int) -> None:
    run(roles, Random(seed), Faults(answers_get_lost=True, loads_fail=True))


@given(st.sampled_from(FLEETS), st.integers(0, 2**32))
@settings(max_examples=100)
def test_lives_that_end_while_only_peers_have_what_is_served(roles: list[Role], seed: int) -> None:
    run(roles, Random(seed), Faults(lives_end=True, sources_go=True))


@given(st.sampled_from(FLEETS), st.integers(0, 2**32))
@settings(max_examples=100)
def test_engines_that_are_drained_and_undrained_at_any_time(roles: list[Role], seed: int) -> None:
    """Requests that are kept go on where an update is called off for want of a pair, and its gate stays closed."""
    faults = Faults(engines_are_drained=True, lives_end=True, coordinator_dies=True, loads_fail=True)
    run(roles, Random(seed), faults, modes=["readmit", "wait", "abort"])


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("mode", MODES)
def test_a_quiet_update_is_committed(strategy: Strategy, mode: InFlightMode) -> None:
    world = World(FLEETS[0], Random(1), NO_FAULTS)
    assert world.ask("v1", strategy, mode)
    world.settle()
    world.check_settled()
    assert [act.ended.outcome for act in world.finished] == ["committed"]
    assert (world.journal[-1].committed.version, world.purged, world.said) == ("v1", {1}, [])
