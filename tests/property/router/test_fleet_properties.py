"""Many requests over one fleet, in any order, against a model of engines: what must hold at every moment."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass
from typing import Any

from hypothesis import HealthCheck
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, multiple, rule

from router.core.commands import Answer, CancelLeg, EndRelay, SendLeg
from router.core.events import Arrived, ClientGone, HandoffExpired, LegAnswered, LegFailed, LegStreaming, StreamEnded
from router.core.fleet import Fleet
from router.core.flow import Flow, FlowRules
from router.core.gate import Gate
from router.settings import RouterSettings

LIFETIME_S = 28.0
TIMEOUT_S = 100.0
JSON = "application/json"
SETTINGS = {
    "job": "test", "host": "h", "port": 1, "internal_host": "h", "internal_port": 2, "handoff_lease_s": 30.0,
    "policy": {"type": "sticky_least_loaded", "session_idle_s": 50.0},
    "engines": [
        {"name": f"{role}{number}", "role": role, "url": f"http://{role}{number}"}
        for role in ("prefill", "decode") for number in range(3)
    ],
}  # fmt: skip
REPLICAS = [engine["name"] for engine in SETTINGS["engines"]]  # type: ignore[index, attr-defined]


@dataclass
class Client:
    flow: Flow
    live: SendLeg | None = None
    arrived_at: float = 0.0
    sent_at: float = 0.0
    prefill_legs: int = 0
    gone: bool = False
    answered: bool = False


class Requests(RuleBasedStateMachine):
    clients = Bundle("clients")

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.fleet = Fleet(RouterSettings.model_validate(SETTINGS))
        for name in REPLICAS:
            self.fleet.probe_passed(name)
        self.gate = Gate()
        self.gate.set("open")
        self.all: list[Client] = []
        self.handoffs: dict[int, float] = {}
        """When the P leg of each handoff was sent."""
        self.used: set[int] = set()

    def step(self, client: Client, event: Any) -> None:
        commands = client.flow.step(event, self.now)
        ended = not isinstance(event, Arrived | LegStreaming)
        if ended:
            client.live = None
        for command in commands:
            assert not client.answered, "commands after the end"
            if isinstance(command, CancelLeg):
                client.live = None
            elif isinstance(command, SendLeg):
                self.check_leg(client, command)
                client.live, client.sent_at = command, self.now
            elif isinstance(command, Answer | EndRelay):
                assert not client.gone
                client.answered = True

    def check_leg(self, client: Client, leg: SendLeg) -> None:
        assert client.live is None, "two live copies"
        assert not client.gone
        assert self.fleet.table.is_usable(leg.replica)
        assert self.gate.state == "open" or (self.gate.state == "holding" and leg.role == "decode")
        assert 0 < leg.timeout_s == client.arrived_at + TIMEOUT_S - self.now, "past the deadline"
        client.prefill_legs += leg.role == "prefill"
        assert client.prefill_legs <= 3
        transfer = json.loads(leg.body).get("kv_transfer_params")
        if leg.role == "decode" and transfer is not None:
            number = transfer["number"]
            assert number not in self.used, "a handoff used twice"
            assert self.now - self.handoffs[number] <= LIFETIME_S, "a handoff past its lease"
            assert leg.send_by == self.handoffs[number] + LIFETIME_S
            self.used.add(number)
        else:
            assert leg.send_by is None

    @rule(target=clients, session=st.sampled_from([None, "a", "b", "c"]))
    def arrive(self, session: str | None) -> Any:
        rules = FlowRules(
            retries=2, request_timeout_s=TIMEOUT_S, handoff_lifetime_s=LIFETIME_S, session_fields=("session_id",)
        )
        client = Client(flow=Flow(fleet=self.fleet, gate=self.gate, rules=rules))
        client.arrived_at = self.now
        body = json.dumps({"prompt": "x" * 40, "session_id": session}).encode()
        self.all.append(client)
        key = str(len(self.all))
        self.step(client, Arrived(path="/v1/completions", body=body, session_header=None, request_key=key))
        return multiple() if client.answered else client

    @rule(client=clients, kind=st.sampled_from(["good", "empty", "400", "500", "error"]))
    def answer(self, client: Client, kind: str) -> None:
        if client.live is None or client.flow.state == "relaying":
            return
        body: Any = {}
        if kind == "good" and client.live.role == "prefill":
            number = len(self.handoffs)
            self.handoffs[number] = client.sent_at
            body = {"kv_transfer_params": {"number": number}}
        elif kind == "error":
            body = {"choices": [{"finish_reason": "error"}]}
        status = int(kind) if kind.isdigit() else 200
        raw = json.dumps(body).encode()
        self.step(client, LegAnswered(leg=client.live.leg, status=status, body=raw, content_type=JSON))

    @rule(client=clients, error=st.booleans())
    def stream(self, client: Client, error: bool) -> None:
        if client.live is not None and client.flow.state == "decode":
            head = b'data: {"error": {"code": 500}}\n' if error else b"data: 1\n"
            self.step(client, LegStreaming(leg=client.live.leg, head=head, content_type="text/event-stream"))

    @rule(client=clients)
    def end_stream(self, client: Client) -> None:
        if client.live is not None and client.flow.state == "relaying":
            self.step(client, StreamEnded(leg=client.live.leg))

    @rule(client=clients, failure=st.sampled_from(["unreachable", "broken", "timeout"]))
    def fail(self, client: Client, failure: Any) -> None:
        if client.live is not None:
            self.step(client, LegFailed(leg=client.live.leg, failure=failure, detail="x"))

    @rule(client=clients)
    def expire(self, client: Client) -> None:
        if client.live is not None and client.live.send_by is not None and client.flow.state == "decode":
            self.step(client, HandoffExpired(leg=client.live.leg))

    @rule(client=consumes(clients))
    def leave(self, client: Client) -> None:
        if not client.answered:
            client.gone = True
            self.step(client, ClientGone())

    @rule(name=st.sampled_from(REPLICAS), good=st.booleans())
    def probe(self, name: str, good: bool) -> None:
        if good:
            self.fleet.probe_passed(name)
        else:
            self.fleet.probe_failed(name, "refused", self.now)

    @rule(session=st.sampled_from(["a", "b", "c"]))
    def finish(self, session: str) -> None:
        self.fleet.finish_session(session)

    @rule(seconds=st.sampled_from([1.0, 20.0, 60.0]))
    def wait(self, seconds: float) -> None:
        self.now += seconds
        self.fleet.expire_sessions(self.now)

    @rule(state=st.sampled_from(["open", "open", "holding", "frozen"]))
    def move_gate(self, state: Any) -> None:
        self.gate.set(state)

    @invariant()
    def the_load_is_what_is_live(self) -> None:
        live = Counter(client.live.replica for client in self.all if client.live is not None)
        for view in self.fleet.views():
            assert view.legs_in_flight == live[view.name]
            assert (view.tokens_in_flight > 0) == (view.legs_in_flight > 0)
            assert view.active_sessions >= 0

    def teardown(self) -> None:
        for client in self.all:
            if not client.answered and not client.gone:
                client.gone = True
                self.step(client, ClientGone())
        for session in ("a", "b", "c"):
            self.fleet.finish_session(session)
        for view in self.fleet.views():
            assert (view.legs_in_flight, view.tokens_in_flight, view.active_sessions) == (0, 0, 0)


Requests.TestCase.settings = hypothesis_settings(
    max_examples=100, stateful_step_count=40, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
TestRequests = Requests.TestCase
