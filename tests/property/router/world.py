"""A router without IO: flows, dispatcher and fleet, and a model of the engines behind them that judges each step.

It carries commands out as the shell does (`router/io/exchange.py`, `desk.py`): events of one request wait their turn,
answers from the line are delivered later, timers fire in their order. What a command claims is compared with what the
model knows; nothing is taken from the router's own books.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import count
from typing import Any, Literal

from router.core.asks import Ask, Grant, LegEnd, Refusal
from router.core.commands import (
    Answer,
    AskReplica,
    CancelLeg,
    Command,
    EndLeg,
    EndRelay,
    Leave,
    ParkLeg,
    Pause,
    SendLeg,
    StartRelay,
)  # fmt: skip
from router.core.dispatcher import Dispatcher, Limits
from router.core.epochs import Epochs, Salter
from router.core.events import (
    Arrived,
    ClientGone,
    Event,
    Granted,
    HandoffExpired,
    Interrupted,
    LegAnswered,
    LegFailed,
    LegStreaming,
    Refused,
    StreamEnded,
    Thawed,
    TimeReached,
)  # fmt: skip
from router.core.fleet import Fleet, ReplicaLost
from router.core.flow import Flow
from router.core.gate import Gate, GateState
from router.core.retry import RetryBudget
from router.core.rules import FlowRules, FlowTools
from router.core.table import Member
from router.settings import EngineRole, RouterSettings

LIFETIME_S = 28.0
TIMEOUT_S = 100.0
RETRIES = 2
JSON = "application/json"
LEG_ENDS = (LegAnswered, LegFailed, HandoffExpired, StreamEnded)


@dataclass(eq=False)
class Engine:
    """What is true of a replica, whatever the router knows."""

    name: str
    role: EngineRole
    instance: str
    epoch: int | None = None
    draining: bool = False


@dataclass(eq=False)
class Handoff:
    epoch: int
    prefill_sent_at: float
    used: bool = False


@dataclass(eq=False)
class Client:
    """One request, as its socket and the engines see it."""

    number: int
    flow: Flow
    arrived_at: float
    live: SendLeg | None = None
    """The copy of it that an engine has."""
    sent_at: float = 0.0
    asked: Ask | None = None
    timer: float | None = None
    prefill_legs: int = 0
    prefill_epoch: int | None = None
    """Of the present attempt."""
    readmitted: int = 0
    gone: bool = False
    answered: bool = False
    left: bool = False
    waiting: bool = False
    events: list[Event] = field(default_factory=list)
    busy: bool = False

    @property
    def over(self) -> bool:
        return self.gone or self.answered

    @property
    def relaying(self) -> bool:
        return self.flow.state == "relaying"


class World:
    """See the module text."""

    def __init__(self, settings: RouterSettings) -> None:
        self.now = 0.0
        self.settings = settings
        self.fleet, self.gate, self.epochs = Fleet(settings), Gate(), Epochs()
        self.fleet.report_losses(self._lost)
        self.dispatcher = Dispatcher(fleet=self.fleet, gate=self.gate, epochs=self.epochs, limits=Limits.of(settings))
        self.salter = Salter(b"secret")
        rules = FlowRules(
            retries=RETRIES, retry_backoff_s=0.5, request_timeout_s=TIMEOUT_S, leg_timeout_s=settings.leg_timeout_s,
            handoff_lifetime_s=LIFETIME_S, session_fields=("session_id",), max_samples=1,
        )  # fmt: skip
        budget = RetryBudget.full(per_request=0.2, most=50)
        self.tools = FlowTools(gate=self.gate, salter=self.salter, budget=budget, rules=rules)
        self.clients: list[Client] = []
        self.engines: dict[str, Engine] = {}
        self.handoffs: list[Handoff] = []
        self.tickets: dict[int, tuple[Member, int]] = {}
        """Reservations that are not given back: the member and the tokens."""
        self.lives: dict[int, Member] = {}
        """Every member that ever was, by its number."""
        self._seen = 0
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

    def confirm(self, name: str, epoch: int) -> None:
        """Weights move while nothing can be sent, or on a replica without legs."""
        if self.gate.state == "frozen" or not self.fleet.members[name].legs:
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
            if leg is not None and (leg.replica, leg.instance) == (lost.replica, lost.instance):
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
                self._send(client, command)
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
            self._judge(client.number, answer)
            client.events.append(Granted(answer) if isinstance(answer, Grant) else Refused(answer))

    def _end(self, end: LegEnd) -> None:
        assert self.tickets.pop(end.ticket, None) is not None, "given back twice"
        self.dispatcher.end_leg(end, self.now)
        self._judge_grants()

    # -- what must hold when a replica is given ------------------------------------------------------------

    def _judge_grants(self) -> None:
        fresh, self._seen = self.dispatcher.outbox[self._seen :], len(self.dispatcher.outbox)
        for number, answer in fresh:
            self._judge(number, answer)

    def _judge(self, number: int, answer: Grant | Refusal) -> None:
        if isinstance(answer, Refusal):
            return
        asked, engine = self.clients[number].asked, self.engines.get(answer.replica)
        assert asked is not None
        assert engine is not None, "a replica that is not there"
        assert (engine.instance, engine.epoch, engine.role) == (answer.instance, answer.epoch, answer.role)
        assert not engine.draining
        self._judge_epoch(asked, answer)
        member = self.fleet.members[answer.replica]
        assert answer.ticket not in self.tickets
        self.tickets[answer.ticket] = (member, asked.tokens)
        most = 1 if member.breaker.state == "trial" else self.settings.max_legs_per_replica
        taken = sum(1 for each, _ in self.tickets.values() if each is member)
        assert most is None or taken <= most, "more than there is room for"
        limit = self.settings.max_requests
        assert limit is None or self.dispatcher.admitted <= limit

    def _judge_epoch(self, asked: Ask, answer: Grant) -> None:
        if asked.handoff_epoch is not None:
            assert self.gate.state != "frozen"
            assert (answer.role, answer.epoch) == ("decode", asked.handoff_epoch)
            return
        assert self.gate.state == "open"
        if asked.min_version is not None:
            committed = [epoch for epoch, name in self.epochs.known().items() if name == asked.min_version]
            assert answer.epoch >= min(committed)

    # -- what must hold when a leg is sent -----------------------------------------------------------------

    def _send(self, client: Client, leg: SendLeg) -> None:
        assert client.live is None, "two live copies"
        assert not client.over, "sent for nobody"
        assert client.asked is not None
        second = client.asked.handoff_epoch is not None
        assert self.gate.state == "open" or (second and self.gate.state == "holding"), f"sent while {self.gate.state}"
        assert self.now < leg.until <= leg.deadline == client.arrived_at + TIMEOUT_S
        body = json.loads(leg.body)
        assert body["cache_salt"] == self.salter.salt(leg.epoch, None)
        if second:
            assert leg.epoch == client.prefill_epoch, "a pair over two epochs"
        else:
            client.prefill_legs += 1
            assert client.prefill_legs <= 1 + RETRIES + client.readmitted
            client.prefill_epoch = leg.epoch if leg.role == "prefill" else None
        self._judge_handoff(leg, body.get("kv_transfer_params") if leg.role == "decode" else None)
        client.live, client.sent_at, client.timer = leg, self.now, leg.until

    def _judge_handoff(self, leg: SendLeg, transfer: Any) -> None:
        if transfer is None:
            assert leg.send_by is None
            return
        handoff = self.handoffs[transfer["number"]]
        assert not handoff.used, "a handoff used twice"
        assert handoff.epoch == leg.epoch, "a handoff of another epoch"
        assert self.now <= handoff.prefill_sent_at + LIFETIME_S == leg.send_by, "a handoff past its lease"
        handoff.used = True

    # -- engines, clients, time ----------------------------------------------------------------------------

    def answer(self, client: Client, kind: str) -> None:
        leg = client.live
        if leg is None or client.relaying:
            return
        body: Any = {}
        if kind == "good" and leg.role == "prefill":
            body = {"kv_transfer_params": {"number": len(self.handoffs)}}
            self.handoffs.append(Handoff(leg.epoch, client.sent_at))
        elif kind == "error":
            body = {"choices": [{"finish_reason": "error"}]}
        status = int(kind) if kind.isdigit() else 200
        raw = json.dumps(body).encode()
        self.feed(client, LegAnswered(leg=leg.leg, status=status, body=raw, content_type=JSON))

    def stream(self, client: Client, head: bytes) -> None:
        """A stream begins, unless nobody reads it."""
        if client.live is not None and client.flow.state in ("prefill", "decode"):
            self.feed(client, LegStreaming(leg=client.live.leg, head=head, content_type="text/event-stream"))

    def end_stream(self, client: Client) -> None:
        if client.live is not None and client.flow.state in ("relaying", "parked"):
            self.feed(client, StreamEnded(leg=client.live.leg))

    def fail(self, client: Client, failure: Any) -> None:
        if client.live is not None:
            self.feed(client, LegFailed(leg=client.live.leg, failure=failure, detail="x"))

    def expire(self, client: Client) -> None:
        if client.live is not None and client.live.send_by is not None and not client.relaying:
            self.feed(client, HandoffExpired(leg=client.live.leg))

    def leave(self, client: Client) -> None:
        if not client.over:
            client.gone = True
            self.feed(client, ClientGone())

    def interrupt(self, client: Client, how: Any) -> None:
        """An update deals with running requests while the gate is holding; an abort by id may come at any time."""
        if how == "asked" or self.gate.state == "holding":
            client.readmitted += how == "readmit"
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
            self.feed(client, Granted(answer) if isinstance(answer, Grant) else Refused(answer))

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

    # -- what must hold at every moment --------------------------------------------------------------------

    def check(self) -> None:
        self._check_load()
        self._check_waiting()
        live = [each for each in self.clients if each.live is not None]
        granted = [answer.ticket for _, answer in self.dispatcher.outbox if isinstance(answer, Grant)]
        assert len(self.tickets) == len(live) + len(granted), "a reservation without a leg, or a leg without one"
        assert all(not each.left for each in live)

    def _check_load(self) -> None:
        legs, tokens = Counter[int](), Counter[int]()
        for member, estimated in self.tickets.values():
            legs[member.order] += 1
            tokens[member.order] += estimated
        pinned = Counter(
            (pin.replica, pin.instance) for record in self.fleet.sessions.all_records() for pin in record.pins.values()
        )
        nameless = sum(1 for each in self.clients if not each.left and each.asked and each.asked.session is None)
        for member in self.lives.values():
            assert (member.legs, member.tokens) == (legs[member.order], tokens[member.order])
            named = pinned[member.name, member.instance]
            assert named <= member.sessions <= named + nameless

    def _check_waiting(self) -> None:
        """Nobody waits who could go: by a scan of all replicas, and not by the router's indexes."""
        waiting = [each for each in self._in_line() if self._could_go(each)]
        assert waiting == [], f"{len(waiting)} wait for nothing"

    def _in_line(self) -> Iterator[Client]:
        answered = {number for number, _ in self.dispatcher.outbox}
        found = [each for each in self.clients if each.waiting and each.number not in answered]
        assert len(found) == self.dispatcher.waiting
        return iter(found)

    def _could_go(self, client: Client) -> bool:
        asked = client.asked
        assert asked is not None
        if asked.handoff_epoch is not None:
            return self.gate.state != "frozen" and self._room("decode", asked.handoff_epoch)
        if self.gate.state != "open":
            return False
        started = self.dispatcher._requests[client.number].admitted
        limit = self.settings.max_requests
        if not started and limit is not None and self.dispatcher.admitted >= limit:
            return False
        known = self.epochs.known()
        allowed = set(known)
        if asked.min_version is not None:
            first = [epoch for epoch, name in known.items() if name == asked.min_version]
            allowed = {epoch for epoch in known if first and epoch >= min(first)}
        pairs = {each for each in allowed if self._usable("prefill", each) and self._usable("decode", each)}
        if pairs:
            return any(self._room("prefill", epoch) for epoch in pairs)
        return any(self._room("colocated", epoch) for epoch in allowed)

    def _usable(self, role: EngineRole, epoch: int) -> list[Member]:
        return [
            member for member in self.fleet.members.values()
            if member.role == role and member.epoch == epoch and member.usable
        ]  # fmt: skip

    def _room(self, role: EngineRole, epoch: int) -> bool:
        return any(member.has_room for member in self._usable(role, epoch))

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
