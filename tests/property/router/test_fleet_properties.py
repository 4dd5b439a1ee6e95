"""Many requests over one router, in any order, while everything around them changes: what must hold at every moment.

One rule draws all kinds of moves: with a rule each, hypothesis leaves half of them out of a run, and hardly any request
gets as far as its second leg.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule

from router.settings import EngineRole, RouterSettings
from tests.property.router.judge import Client
from tests.property.router.world import World

REPLICAS: dict[str, EngineRole] = {
    **{f"prefill{number}": "prefill" for number in range(3)},
    **{f"decode{number}": "decode" for number in range(3)},
    "colocated0": "colocated",
}
NAMES = sorted(REPLICAS)
SESSIONS = [None, None, "a", "b", "c"]
VERSIONS = [None, None, None, None, "v1", "v2", "v3"]
POLICIES: list[dict[str, Any]] = [
    {"type": "sticky_least_loaded", "session_idle_s": 50.0},
    {"type": "sticky_least_loaded", "session_idle_s": 50.0, "move": {"factor": 1.0, "min_gain_s": 0.0, "rest_s": 1.0}},
    {"type": "round_robin"},
    {"type": "least_loaded"},
    {"type": "consistent_hash"},
    {"type": "power_of_two"},
]
ENGINE_STEPS = [
    *["good"] * 8, "empty", "400", "500", "error", *["stream"] * 3, "stream error", *["stream ends"] * 3,
    "unreachable", "broken", "engine_error", "expired",
]  # fmt: skip
EPOCHS = 3


def make_settings(**limits: Any) -> RouterSettings:
    values: dict[str, Any] = {"job": "test", "host": "h", "port": 1, "internal_host": "h", "internal_port": 2}
    return RouterSettings.model_validate(values | {"engines": [], "handoff_lease_s": 30.0} | limits)


class Moves:
    """What can happen, each with one drawn number that decides the rest."""

    def __init__(self, world: World) -> None:
        self.world = world

    def arrive(self, number: int) -> None:
        session, version = SESSIONS[number % len(SESSIONS)], VERSIONS[number % len(VERSIONS)]
        self.world.arrive(session, version, 10 if number % 2 else 4000)

    def work(self, number: int) -> None:
        """An engine answers, streams or fails."""
        live = self.world.live()
        if live:
            client = live[number % len(live)]
            self.world.engine_step(client, ENGINE_STEPS[number // len(live) % len(ENGINE_STEPS)])

    def leave(self, number: int) -> None:
        self._with_client(number, self.world.leave)

    def interrupt(self, number: int) -> None:
        how = ("readmit", "readmit", "abort", "asked", "keep", "shutdown")[number % 6]
        self._with_client(number // 6, lambda client: self.world.interrupt(client, how))

    def finish(self, number: int) -> None:
        self.world.fleet.finish_session(SESSIONS[number % len(SESSIONS)] or "a")

    def move_gate(self, number: int) -> None:
        self.world.move_gate(("open", "holding", "open", "frozen")[number % 4])

    def deliver(self, _number: int) -> None:
        self.world.deliver()

    def wait(self, number: int) -> None:
        self.world.wait((0.5, 0.5, 5.0, 20.0, 30.0)[number % 5])

    def probe(self, number: int) -> None:
        name = NAMES[number % len(NAMES)]
        if name in self.world.engines:
            self.world.probe(name, ("good", "good", "good", "slow", "refused")[number % 5])

    def change(self, number: int) -> None:
        """A replica goes, comes back, or gets other weights."""
        name, epoch = NAMES[number % len(NAMES)], 1 + number % EPOCHS
        if name not in self.world.engines:
            self.bring(name, epoch)
            return
        match number % 5:
            case 0 | 1 as drained:
                self.world.drain(name, drained == 0)
            case 2:
                self.world.restart(name)
            case 3:
                self.world.remove(name)
            case _:
                self.world.install(name, epoch)

    def update(self, number: int) -> None:
        """New weights for all, if nothing can be sent now."""
        if self.world.gate.state == "frozen":
            for name in self.world.engines:
                self.world.install(name, 1 + number % EPOCHS)

    def bring(self, name: str, epoch: int) -> None:
        self.world.add(name, REPLICAS[name])
        self.world.install(name, epoch)
        self.world.probe(name, "good")

    def _with_client(self, number: int, move: Callable[[Client], None]) -> None:
        open_ = [each for each in self.world.clients if not each.left]
        if open_:
            move(open_[number % len(open_)])


MOVES: list[Callable[[Moves, int], None]] = [
    Moves.deliver, *[Moves.arrive] * 5, *[Moves.work] * 12, Moves.deliver, Moves.leave, *[Moves.interrupt] * 2,
    Moves.finish, *[Moves.move_gate] * 2, *[Moves.wait] * 2, *[Moves.probe] * 2, Moves.change, Moves.update,
]  # fmt: skip


class Requests(RuleBasedStateMachine):
    @initialize(
        policy=st.sampled_from(POLICIES),
        max_requests=st.sampled_from([None, 2, 4]),
        max_legs=st.sampled_from([None, 1, 2]),
        max_waiting=st.sampled_from([100, 100, 2]),
        leg_timeout_s=st.sampled_from([None, 20.0]),
        skip=st.sampled_from([0, 1000]),
        epochs=st.lists(st.integers(1, 2), min_size=len(REPLICAS), max_size=len(REPLICAS)),
    )
    def start(
        self, policy: Any, max_requests: Any, max_legs: Any, max_waiting: int, leg_timeout_s: Any, skip: int,
        epochs: list[int],
    ) -> None:  # fmt: skip
        self.world = World(
            make_settings(
                policy=policy, max_requests=max_requests, max_legs_per_replica=max_legs, max_waiting=max_waiting,
                leg_timeout_s=leg_timeout_s, skip_prefill_below_tokens=skip,
            )
        )  # fmt: skip
        self.moves = Moves(self.world)
        for name, epoch in zip(REPLICAS, epochs, strict=True):
            self.moves.bring(name, epoch)
        self.world.move_gate("open")

    @rule(moves=st.lists(st.tuples(st.sampled_from(MOVES), st.integers(0, 10_000)), min_size=1, max_size=10))
    def go_on(self, moves: list[tuple[Callable[[Moves, int], None], int]]) -> None:
        for move, number in moves:
            move(self.moves, number)
            self.world.check()

    def teardown(self) -> None:
        if hasattr(self, "world"):
            self.world.close()


Requests.TestCase.settings = hypothesis_settings(
    max_examples=60,
    stateful_step_count=30,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
    # Without an explanation of a failure, which would trace every line and take minutes.
    phases=[Phase.explicit, Phase.reuse, Phase.generate, Phase.shrink],
)
# A busy machine is no failure.
TestRequests = pytest.mark.timeout(600)(Requests.TestCase)
