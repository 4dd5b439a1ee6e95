"""`kill -9` of the control plane at each step of its journal, and of the router in each state of its gate.

Whatever dies, the update ends as it should, the fleet is in one epoch with its gate open, no process is left over, and
every reply that a client got is what the weights give whose version it names: nobody was served by an engine that was
not confirmed.
"""

from __future__ import annotations

import os
import signal
import time
from typing import Any, Literal, get_args

import pytest

from orchestrator.spec.weights import Strategy
from orchestrator.weights.phases import SEQUENCES
from orchestrator.weights.words import Phase
from router.core.gate import GateState
from tests.e2e.harness import Headrace, router_state, run_id, run_pids, unit_pid
from tests.fleet.control import Control, Push
from tests.fleet.expected import SAME, expected
from tests.fleet.job import NAME, serves, wait_whole
from tests.fleet.journal import held_at
from tests.fleet.traffic import check, difference, logprobs, served, traffic

pytestmark = [pytest.mark.stack, pytest.mark.timeout(300)]

STRATEGIES: tuple[Strategy, ...] = get_args(Strategy)
Moment = Literal["recorded", "sent"]
"""Just as the step is in the journal, or when its commands have been sent as well and their answers cannot be kept."""
SENT_S = 0.3
SHORT: set[tuple[str, ...]] = {
    ("barrier", "load", "sent"),
    ("barrier", "commit", "recorded"),
    ("rolling", "publish", "recorded"),
    ("barrier", "pause_decode", "frozen"),
}
"""Those of `make test`."""
GATES: tuple[tuple[Strategy, Phase, GateState], ...] = (
    ("barrier", "prefetch", "open"),
    ("barrier", "in_flight", "holding"),
    ("barrier", "pause_decode", "frozen"),
    ("rolling", "load", "open"),
)


def case(*values: str) -> Any:
    return pytest.param(*values, marks=[] if values in SHORT else [pytest.mark.full])


@pytest.mark.parametrize(
    ("strategy", "phase", "moment"),
    [
        case(strategy, phase, moment)
        for strategy in STRATEGIES
        for phase in SEQUENCES[strategy, "forward"]
        for moment in get_args(Moment)
    ],
)
def test_the_control_plane_is_killed(
    job: dict[str, Any], control: Control, headrace: Headrace, strategy: Strategy, phase: Phase, moment: Moment
) -> None:
    before, old_epoch = control.served()
    with traffic(job) as replies:
        push = begin(control, strategy)
        steps = SEQUENCES[strategy, "forward"]
        with held_at(headrace.home, push.number, steps[steps.index(phase) :]) as caught:
            time.sleep(SENT_S if moment == "sent" else 0)
            control.kill()
        print(f"killed at {caught}")
        control.start()
        control.wait_committed(push)
        wait_whole(job, control)
    check(replies, {old_epoch: before, serves(job, control, push.version): push.version})
    assert difference(expected(push.weights), logprobs(job)) < SAME
    assert leaders(headrace) == recorded(control)


@pytest.mark.parametrize(("strategy", "phase", "gate"), [case(*each) for each in GATES])
def test_the_router_is_killed(
    job: dict[str, Any], control: Control, headrace: Headrace, strategy: Strategy, phase: Phase, gate: GateState
) -> None:
    """Its clients lose their connections, and those of the next life are served."""
    before, old_epoch = control.served()
    router = unit_pid(control.status(), "router")
    with traffic(job) as replies:
        push = begin(control, strategy)
        with held_at(headrace.home, push.number, [phase]):
            assert router_state(job)["gate"] == gate
            os.kill(router, signal.SIGKILL)
        control.wait_committed(push)
        wait_whole(job, control)
    check(served(replies), {old_epoch: before, serves(job, control, push.version): push.version})
    assert difference(expected(push.weights), logprobs(job)) < SAME
    assert leaders(headrace) == recorded(control)


def begin(control: Control, strategy: Strategy) -> Push:
    """With a prefetch, which lasts until somebody watches the journal."""
    return control.push(strategy=strategy, load_mode="cpu_prefetch")


def leaders(headrace: Headrace) -> set[int]:
    """Of all processes of the job: each unit is a session of its own."""
    found = set()
    for pid in run_pids(run_id(headrace, NAME)):
        try:
            found.add(os.getsid(pid))
        except ProcessLookupError:
            continue
    return found


def recorded(control: Control) -> set[int]:
    return {unit["pid"] for unit in control.status()["units"]}
