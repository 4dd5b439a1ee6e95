"""Which processes are started now, from what is wanted and what is seen."""

from __future__ import annotations

import pytest

from orchestrator.plan.kinds import UnitKind
from orchestrator.store.keeping import UnitEnd
from orchestrator.supervisor.restarts import POLICIES, row_of
from orchestrator.supervisor.upkeep import LifeState, UnitSight, upkeep

NOW = 1_000.0
UNITS: dict[str, UnitKind] = {
    "mooncake-master": "master",
    "storage-prefill-0": "storage",
    "prefill-0": "engine",
    "decode-0": "engine",
    "router": "router",
    "prometheus": "monitoring",
}


def sights(
    states: dict[str, LifeState], replaced: tuple[str, ...] = (), spent: tuple[str, ...] = (), at: float = NOW - 500
) -> list[UnitSight]:
    """Of all units; those not named are ready. Each that has ended did so once, those that are spent too often."""
    found = []
    for name, kind in UNITS.items():
        state = states.get(name, "ready")
        times = POLICIES[kind].budget if name in spent else 1 if state == "ended" else 0
        row = row_of(kind, [UnitEnd(at=at, ready_s=0, cause="it broke")] * times)
        found.append(UnitSight(name=name, kind=kind, state=state, is_replaced=name in replaced, row=row))
    return found


@pytest.mark.parametrize("name", UNITS)
def test_whatever_ends_is_started_again(name: str) -> None:
    assert upkeep(sights({name: "ended"}), NOW).start == (name,)


def test_nothing_is_started_where_all_is_as_wanted() -> None:
    assert upkeep(sights({}), NOW).start == ()
    assert upkeep(sights({"prefill-0": "coming_up"}), NOW).start == ()


@pytest.mark.parametrize("state", ["ready", "coming_up"])
def test_a_life_that_somebody_wants_replaced_is_ended_ready_or_not(state: LifeState) -> None:
    assert upkeep(sights({"decode-0": state}, replaced=("decode-0",)), NOW).start == ("decode-0",)


def test_what_needs_the_master_waits_for_it() -> None:
    everything: dict[str, LifeState] = dict.fromkeys(UNITS, "ended")
    assert upkeep(sights(everything), NOW).start == ("mooncake-master", "router", "prometheus")
    assert upkeep(sights({**everything, "mooncake-master": "coming_up"}), NOW).start == ("router", "prometheus")
    assert upkeep(sights({**everything, "mooncake-master": "ready"}), NOW).start == tuple(UNITS)[1:]


def test_a_master_that_was_given_up_holds_nobody_back() -> None:
    up = upkeep(sights({"mooncake-master": "ended", "decode-0": "ended"}, spent=("mooncake-master",)), NOW)
    assert (up.start, [*up.given_up]) == (("decode-0",), ["mooncake-master"])


def test_a_crash_loop_pauses_and_then_ends() -> None:
    name, policy = "prefill-0", POLICIES["engine"]
    for ends in range(1, policy.budget + 1):
        row = row_of("engine", [UnitEnd(at=NOW, ready_s=0, cause="it broke")] * ends)
        rest = [each for each in sights({}) if each.name != name]
        seen = [*rest, UnitSight(name=name, kind="engine", state="ended", is_replaced=False, row=row)]
        pause_s = 0.0 if ends == 1 else min(policy.longest_pause_s, 2.0 ** (ends - 2))
        is_spent = ends == policy.budget
        if pause_s:
            assert upkeep(seen, NOW + pause_s - 0.01).start == ()
        assert upkeep(seen, NOW + pause_s).start == (() if is_spent else (name,))
        assert ([*upkeep(seen, NOW).given_up] == [name]) == is_spent
