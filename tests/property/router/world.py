"""A router without IO: flows, dispatcher, fleet, and the engines, clients and clock around them.

It carries commands out as the shell does (`router/io/exchange.py`, `desk.py`): events of one request wait their turn,
answers from the line are delivered later, timers fire in their order. `judge.py` is told of each step.
"""

from __future__ import annotations

import json
from itertools import count
from typing import Any, Literal

from router.core.asks import Grant, LegEnd
from router.core.commands import (
    Answer,
    AskReplica,
    CancelLeg,
    Command,
    CountReadmitted,
    EndLeg,
    EndRelay,
    Leave,
    ParkLeg,
    Pause,
    SendLeg,
    StartRelay,
)  # fmt: skip
from router.core.events import (
    Arrived,
    ClientGone,
    Event,
    HandoffExpired,
    Interrupted,
    LegAnswered,
    LegFailed,
    LegStreaming,
    StreamEnded,
    Thawed,
    TimeReached,
)  # fmt: skip
from router.core.fleet import ReplicaLost
from router.core.flow import Flow
from router.core.gate import GateState
from router.settings import EngineRole, RouterSettings
from tests.property.router.judge import Client, Engine, Handoff, Judge

JSON = "application/json"
LEG_ENDS = (LegAnswered, LegFailed, HandoffExpired, StreamEnded)


class World(Judge):
    """See the module text."""

    def __init__(self, settings: RouterSettings) -> None:
        super().__init__(settings)
        self.fleet.report_losses(self._lost)
        self._seen = 0
        """How many answers in the outbox have been judged."""
        self._instances = count(1)

    # -- replicas ------------------------------------------------------------------------------------------

    def add(self, name: str, role: EngineRole) -> None:
        instance = f"life-{next(self._instances)}"
        self.engines[name] = Engine(name, role, instance)
        self.fleet.add(name=name, role=role, url=f"http://{name}", instance=instance)
        self._changed()

    def remove(self, name: str) -> None:
        del self.engines[name]
        self.fleet.remove(name)
        self._changed()

    def restart(self, name: str) -> None:
        """Another life on the same port, which the next probe meets."""
        engine = self.engines[name]
        engine.instance, engine.epoch, engine.draining = f"life-{next(self._instances)}", None, False
        self.fleet.recognise(name, engine.instance, self.now)
        self._changed()

    def drain(self, name: str, draining: bool) -> None:
        self.engines[name].draining = draining
        self.fleet.drain(name, draining)
        self._changed()

    def install(self, name: str, epoch: int) -> None:
        """Weights move while nothing can be sent, or on a replica without legs."""
        if self.gate.state == "frozen" or not self.fleet.members[name].legs:
            self.epochs.commit(epoch, f"v{epoch}")
            self.engines[name].epoch = epoch
            self.fleet.confirm(name, epoch)
            self._changed()

    def probe(self, name: str, found: Literal["good", "slow", "refused"]) -> None:
        if found == "good":
            self.fleet.probe_passed(name, self.now)
        else:
            self.fleet.probe_failed(name, found, self.now)
        self._changed()

    def _changed(self) -> None:
        self.lives |= {member.order: member for member in self.fleet.members.values()}
        self.dispatcher.look_again(self.now)
        self._judge_grants()

    def _lost(self, lost: ReplicaLost) -> None:
        for client in self.clients:
            leg = client.live
            if leg is None or (leg.replica, leg.instance) != (lost.replica, lost.instance):
                continue
            if lost.silent or client.flow.state not in ("relaying", "parked"):
                self.feed(client, LegFailed(leg=leg.leg, failure="unreachable", detail="taken out of use"))

    # -- requests ------------------------------------------------------------------------------------------

    def arrive(self, session: str | None, min_version: str | None, length: int) -> Client:
        number = len(self.clients)
        client = Client(number, Flow(self.tools), self.now)
        self.clients.append(client)
        body = json.dumps({"prompt": "x" * length, "session_id": session}).encode()
        arrived = Arrived(
            number=number, route="completions", path="/v1/completions", body=body, session_header=None,
            min_version=min_version, request_key=str(number),
        )  # fmt: skip
        self.feed(client, arrived)
        return client

    def feed(self, client: Client, event: Event) -> None:
        client.events.append(event)
        if client.busy:
            return
        client.busy = True
        while client.events:
            event = client.events.pop(0)
            if isinstance(event, LEG_ENDS):
                client.live = client.timer = None
            for command in client.flow.step(event, self.now):
                self._carry_out(client, command)
        client.busy = False

    def _carry_out(self, client: Client, command: Command) -> None:
        assert not client.left, "commands after the end"
        match command:
            case AskReplica():
                self._ask(client, command)
            case SendLeg():
                self.sent(client, command)
            case CancelLeg():
                assert self.gate.state != "frozen", "closed while frozen"
                client.live = client.timer = None
            case ParkLeg():
                assert self.gate.state == "frozen"
                client.timer = None
            case EndLeg(end=end):
                self._end(end)
            case Leave():
                assert client.live is None, "left a live leg behind"
                client.left, client.waiting, client.timer = True, False, None
                self.dispatcher.leave(client.number, self.now)
                self._judge_grants()
            case CountReadmitted():
                client.readmitted += 1
            case Pause(until=until):
                client.timer = until
            case StartRelay():
                client.timer = client.live.deadline if client.live is not None else None
            case Answer() | EndRelay():
                assert not client.over, "answered twice, or to nobody"
                client.answered = True

    def _ask(self, client: Client, command: AskReplica) -> None:
        client.asked = command.ask
        answer = self.dispatcher.ask(command.ask, self.now)
        self._judge_grants()
        if answer is None:
            client.timer, client.waiting = command.until, True
        else:
            if isinstance(answer, Grant):
                self.granted(client.number, answer)
            client.events.append(answer)

    def _end(self, end: LegEnd) -> None:
        member = self.given_back(end.ticket)
        was_usable = member.usable
        self.dispatcher.end_leg(end, self.now)
        if was_usable and not member.usable:
            self.dispatcher.tick(self.now)  # as the clock does soon after
        self._judge_grants()

    def _judge_grants(self) -> None:
        fresh, self._seen = self.dispatcher.outbox[self._seen :], len(self.dispatcher.outbox)
        for number, answer in fresh:
            if isinstance(answer, Grant):
                self.granted(number, answer)

    # -- engines, clients, time ----------------------------------------------------------------------------

    def live(self) -> list[Client]:
        return [each for each in self.clients if each.live is not None]

    def engine_step(self, client: Client, step: str) -> None:
        """What an engine does with the copy of a request that it has, if that can happen now."""
        assert client.live is not None
        leg, state = client.live.leg, client.flow.state
        event: Event | None = None
        if step in ("unreachable", "broken", "engine_error"):
            event = LegFailed(leg=leg, failure=step, detail="x")  # type: ignore[arg-type]
        elif step == "stream ends":
            event = StreamEnded(leg=leg) if state in ("relaying", "parked") else None
        elif step == "expired":
            event = HandoffExpired(leg=leg) if client.live.send_by is not None and state != "relaying" else None
        elif step.startswith("stream"):
            head = b'data: {"error": {"code": 500}}\n' if step == "stream error" else b"data: 1\n"
            streaming = LegStreaming(leg=leg, head=head, content_type="text/event-stream")
            event = streaming if state == "decode" or (state == "prefill" and step == "stream error") else None
        elif state != "relaying":
            event = self._answered(client, client.live, step)
        if event is not None:
            self.feed(client, event)

    def _answered(self, client: Client, leg: SendLeg, kind: str) -> LegAnswered:
        body: Any = {}
        if kind == "good" and leg.role == "prefill":
            body = {"kv_transfer_params": {"number": len(self.handoffs)}}
            self.handoffs.append(Handoff(leg.epoch, client.sent_at))
        elif kind == "error":
            body = {"choices": [{"finish_reason": "error"}]}
        status = int(kind) if kind.isdigit() else 200
        return LegAnswered(leg=leg.leg, status=status, body=json.dumps(body).encode(), content_type=JSON)

    def leave(self, client: Client) -> None:
        if not client.over:
            client.gone = True
            self.feed(client, ClientGone())

    def interrupt(self, client: Client, how: Any) -> None:
        """An update deals with running requests while the gate is holding; an abort by id or a shutdown may come at
        any time. What was decided before is told before: an answer must not meet a request that has begun anew."""
        if how in ("asked", "shutdown") or self.gate.state == "holding":
            self.deliver()
            self.feed(client, Interrupted(how))

    def move_gate(self, state: GateState) -> None:
        self.gate.set(state)
        if state != "frozen":
            for client in [each for each in self.clients if each.flow.state == "parked"]:
                self.feed(client, Thawed())
        self._changed()

    def deliver(self) -> None:
        """Tell those who waited; who has left meanwhile gives its place back."""
        answers, self.dispatcher.outbox, self._seen = self.dispatcher.outbox, [], 0
        for number, answer in answers:
            client = self.clients[number]
            if client.left:
                if isinstance(answer, Grant):
                    self._end(LegEnd(ticket=answer.ticket, outcome="cancelled"))
                continue
            client.timer, client.waiting = None, False
            self.feed(client, answer)

    def wait(self, seconds: float) -> None:
        until = self.now + seconds
        while True:
            self.deliver()
            due = [each for each in self.clients if each.timer is not None and each.timer <= until]
            if not due and not self.dispatcher.outbox:
                break
            if due:
                client = min(due, key=lambda each: each.timer or 0.0)
                self.now, client.timer = max(self.now, client.timer or 0.0), None
                self.feed(client, TimeReached())
        self.now = until
        self.dispatcher.tick(self.now)
        self._judge_grants()

    def close(self) -> None:
        """All clients leave and all sessions end: nothing may be left."""
        self.move_gate("open")
        for client in self.clients:
            self.leave(client)
        self.deliver()
        for record in self.fleet.sessions.all_records():
            self.fleet.finish_session(record.id)
        self.check()
        assert all(client.left or client.answered for client in self.clients)
        assert (self.dispatcher.waiting, self.dispatcher.admitted, self.tickets) == (0, 0, {})
        for member in self.lives.values():
            assert (member.legs, member.tokens, member.sessions) == (0, 0, 0)
