"""`kill -9` of the control plane at each step of its journal, on each way that an update can go, and of the router in
each state of its gate.

Whatever dies, the update ends as it should, the fleet is in one epoch with its gate open, no process is left over, and
every reply that a client got is what the weights give whose version it names: nobody was served by an engine that was
not confirmed.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from contextlib import ExitStack
from typing import Any, Literal, get_args

import pytest

from orchestrator.spec.weights import Strategy
from orchestrator.weights.phases import SEQUENCES
from orchestrator.weights.words import Going, Phase
from router.core.gate import GateState
from tests.e2e.harness import Headrace, router_state, run_id, run_pids, unit_pid, wait_until
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
    ("rolling", "back", "confirm"),
}
"""Those of `make test`."""
GATES: tuple[tuple[Strategy, Phase, GateState], ...] = (
    ("barrier", "prefetch", "open"),
    ("barrier", "in_flight", "holding"),
    ("barrier", "pause_decode", "frozen"),
    ("rolling", "load", "open"),
)
GIVEN_UP: dict[tuple[Strategy, Going], Phase] = {
    ("barrier", "off"): "freeze",
    ("barrier", "back"): "load",
    ("rolling", "off"): "drain",
    ("rolling", "back"): "drain",
}
"""At which step of an update that goes forward an engine is stopped, so that it hangs; then it is cancelled."""
HANGS_S = 1.0
DECODE = ("decode-0", "decode-1")


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
        print(f"killed at {caught['phase']}")
        control.start()
        control.wait_committed(push)
        wait_whole(job, control)
    check(replies, {old_epoch: before, serves(job, control, push.version): push.version})
    assert difference(expected(push.weights), logprobs(job)) < SAME
    assert leaders(headrace) == recorded(control)


@pytest.mark.parametrize(
    ("strategy", "going", "phase"),
    [
        case(strategy, going, phase)
        for strategy, going in GIVEN_UP
        for phase in SEQUENCES[strategy, going]
        # An update that is called off has filled no epoch that could be purged.
        if (going, phase) != ("off", "purge")
    ],
)
def test_the_control_plane_is_killed_while_an_update_is_given_up(
    job: dict[str, Any], control: Control, headrace: Headrace, strategy: Strategy, going: Going, phase: Phase
) -> None:
    before, old_epoch = control.served()
    engines = {unit["name"]: unit["pid"] for unit in control.status()["units"]}
    with traffic(job) as replies, ExitStack() as at_last:
        push = control.push(strategy=strategy)
        with held_at(headrace.home, push.number, [GIVEN_UP[strategy, going]]) as forward:
            # Of a rolling update that goes back, not one of the first group, which is to have its weights.
            fit = [name for name in DECODE if (name in forward["group"]) == (going == "off")]
            hanging = next(iter(fit), DECODE[0])
            os.kill(engines[hanging], signal.SIGSTOP)
            at_last.callback(os.kill, engines[hanging], signal.SIGCONT)
        if (strategy, going) == ("rolling", "back"):
            wait_until("the second group is moved", lambda: hanging in control.get("/weights")["course"]["group"])
        assert headrace.run("weights", "cancel", NAME, "--no-wait", timeout_s=60).returncode == 0
        goes_on = threading.Timer(HANGS_S, os.kill, (engines[hanging], signal.SIGCONT))
        goes_on.start()
        steps = SEQUENCES[strategy, going]
        with held_at(headrace.home, push.number, steps[steps.index(phase) :], going) as caught:
            control.kill()
        goes_on.join()
        print(f"killed at {caught['phase']}")
        control.start()
        assert control.outcome(push) == ("cancelled" if going == "off" else "rolled_back", "by request")
        wait_whole(job, control)
    epochs = {old_epoch: before, serves(job, control, before): before}
    if any(forward["epoch"] in reply.label["epochs"] for reply in served(replies)):
        # The first group of a rolling update has served it.
        epochs[forward["epoch"]] = push.version
    check(replies, epochs)
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
