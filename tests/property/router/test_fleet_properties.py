"""Many requests over one router, in any order, while everything around them changes: what must hold at every moment."""

from __future__ import annotations

from typing import Any

from hypothesis import HealthCheck
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, precondition, rule

from router.settings import EngineRole, RouterSettings
from tests.property.router.world import Client, World

REPLICAS: dict[str, EngineRole] = {
    **{f"prefill{number}": "prefill" for number in range(3)},
    **{f"decode{number}": "decode" for number in range(3)},
    "colocated0": "colocated",
}
NAMES = st.sampled_from(sorted(REPLICAS))
SESSIONS = ["a", "b", "c"]
POLICIES: list[dict[str, Any]] = [
    {"type": "sticky_least_loaded", "session_idle_s": 50.0},
    {"type": "sticky_least_loaded", "session_idle_s": 50.0, "move": {"factor": 1.0, "min_gain_s": 0.0, "rest_s": 1.0}},
    {"type": "round_robin"},
    {"type": "least_loaded"},
    {"type": "consistent_hash"},
    {"type": "power_of_two"},
]


def make_settings(**limits: Any) -> RouterSettings:
    values: dict[str, Any] = {"job": "test", "host": "h", "port": 1, "internal_host": "h", "internal_port": 2}
    return RouterSettings.model_validate(
        values | {"engines": [], "handoff_lease_s": 30.0, "retry_backoff_s": 0.5} | limits
    )


class Requests(RuleBasedStateMachine):
    clients = Bundle("clients")

    @initialize(
        policy=st.sampled_from(POLICIES),
        max_requests=st.sampled_from([None, 2, 4]),
        max_legs=st.sampled_from([None, 1, 2]),
        max_waiting=st.sampled_from([2, 100]),
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
        for epoch in (1, 2):
            self.world.epochs.commit(epoch, f"v{epoch}")
        for (name, role), epoch in zip(REPLICAS.items(), epochs, strict=True):
            self.world.add(name, role)
            self.world.confirm(name, epoch)
            self.world.probe(name, "good")
        self.world.move_gate("open")

    # -- requests ------------------------------------------------------------------------------------------

    @rule(
        target=clients,
        session=st.sampled_from([None, *SESSIONS]),
        min_version=st.sampled_from([None, None, None, "v1", "v2", "v3"]),
        length=st.sampled_from([10, 4000]),
    )
    def arrive(self, session: str | None, min_version: str | None, length: int) -> Client:
        return self.world.arrive(session, min_version, length)

    @rule(client=clients, kind=st.sampled_from(["good", "good", "good", "empty", "400", "500", "error"]))
    def answer(self, client: Client, kind: str) -> None:
        self.world.answer(client, kind)

    @rule(client=clients, error=st.booleans())
    def stream(self, client: Client, error: bool) -> None:
        self.world.stream(client, b'data: {"error": {"code": 500}}\n' if error else b"data: 1\n")

    @rule(client=clients)
    def end_stream(self, client: Client) -> None:
        self.world.end_stream(client)

    @rule(client=clients, failure=st.sampled_from(["unreachable", "broken", "engine_error"]))
    def fail(self, client: Client, failure: str) -> None:
        self.world.fail(client, failure)

    @rule(client=clients)
    def expire(self, client: Client) -> None:
        self.world.expire(client)

    @rule(client=consumes(clients))
    def leave(self, client: Client) -> None:
        self.world.leave(client)

    @rule(client=clients, how=st.sampled_from(["asked", "abort", "readmit", "keep"]))
    def interrupt(self, client: Client, how: str) -> None:
        self.world.interrupt(client, how)

    @rule(session=st.sampled_from(SESSIONS))
    def finish(self, session: str) -> None:
        self.world.fleet.finish_session(session)

    # -- what is around them -------------------------------------------------------------------------------

    @rule(state=st.sampled_from(["open", "open", "holding", "frozen"]))
    def move_gate(self, state: Any) -> None:
        self.world.move_gate(state)

    @rule()
    def deliver(self) -> None:
        self.world.deliver()

    @rule(seconds=st.sampled_from([1.0, 5.0, 20.0, 60.0]))
    def wait(self, seconds: float) -> None:
        self.world.wait(seconds)

    @rule(name=NAMES, found=st.sampled_from(["good", "good", "good", "slow", "refused"]))
    def probe(self, name: str, found: Any) -> None:
        if name in self.world.engines:
            self.world.probe(name, found)

    @rule(name=NAMES, draining=st.booleans())
    def drain(self, name: str, draining: bool) -> None:
        if name in self.world.engines:
            self.world.drain(name, draining)

    @rule(name=NAMES, epoch=st.integers(1, 3))
    def install(self, name: str, epoch: int) -> None:
        self.world.epochs.commit(epoch, f"v{epoch}")
        if name in self.world.engines:
            self.world.confirm(name, epoch)

    @precondition(lambda self: self.world.gate.state == "frozen")
    @rule(epoch=st.integers(1, 3))
    def install_everywhere(self, epoch: int) -> None:
        self.world.epochs.commit(epoch, f"v{epoch}")
        for name in self.world.engines:
            self.world.confirm(name, epoch)

    @rule(name=NAMES)
    def restart(self, name: str) -> None:
        if name in self.world.engines:
            self.world.restart(name)

    @rule(name=NAMES, epoch=st.integers(1, 2))
    def remove_or_add(self, name: str, epoch: int) -> None:
        if name in self.world.engines:
            self.world.remove(name)
        else:
            self.world.add(name, REPLICAS[name])
            self.world.confirm(name, epoch)
            self.world.probe(name, "good")

    @invariant()
    def all_is_as_it_must_be(self) -> None:
        self.world.check()

    def teardown(self) -> None:
        if hasattr(self, "world"):
            self.world.close()


Requests.TestCase.settings = hypothesis_settings(
    max_examples=150, stateful_step_count=40, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
TestRequests = Requests.TestCase
