"""What is true of requests and engines, and what must therefore hold of each step that the router takes.

`world.py` carries the router's commands out and tells the judge. Where legs, handoffs and reservations are is the
judge's own account; that a replica is in use (probes, breaker) is taken from its `Member`, which has tests of its own.
"""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from router.core.asks import Ask, Grant
from router.core.commands import SendLeg
from router.core.dispatcher import Dispatcher, Limits
from router.core.epochs import Epochs, Salter
from router.core.events import Event
from router.core.fleet import Fleet
from router.core.flow import Flow
from router.core.gate import Gate
from router.core.retry import RetryBudget
from router.core.rules import FlowRules, FlowTools
from router.core.table import Member
from router.settings import EngineRole, RouterSettings

LIFETIME_S = 28.0
TIMEOUT_S = 100.0
RETRIES = 2


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
    admitted: bool = False
    """It has been granted a leg."""
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


class Judge:
    """See the module text."""

    def __init__(self, settings: RouterSettings) -> None:
        self.now = 0.0
        self.settings = settings
        self.fleet, self.gate, self.epochs = Fleet(settings), Gate(), Epochs()
        self.dispatcher = Dispatcher(fleet=self.fleet, gate=self.gate, epochs=self.epochs, limits=Limits.of(settings))
        self.salter = Salter(b"secret")
        rules = FlowRules(
            retries=RETRIES, retry_backoff_s=0.5, request_timeout_s=TIMEOUT_S, leg_timeout_s=settings.leg_timeout_s,
            handoff_lifetime_s=LIFETIME_S, session_fields=("session_id",), max_samples=1, readmit_streams=False,
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

    @property
    def admitted(self) -> int:
        return sum(1 for each in self.clients if each.admitted and not each.left)

    # -- at each step --------------------------------------------------------------------------------------

    def granted(self, number: int, answer: Grant) -> None:
        asked, engine = self.clients[number].asked, self.engines.get(answer.replica)
        assert asked is not None
        assert engine is not None, "a replica that is not there"
        assert (engine.instance, engine.epoch, engine.role) == (answer.instance, answer.epoch, answer.role)
        assert not engine.draining
        self._check_epoch(asked, answer)
        member = self.fleet.members[answer.replica]
        assert answer.ticket not in self.tickets
        self.tickets[answer.ticket] = (member, asked.tokens)
        self.clients[number].admitted = True
        most = 1 if member.breaker.state == "trial" else self.settings.max_legs_per_replica
        taken = sum(1 for each, _ in self.tickets.values() if each is member)
        assert most is None or taken <= most, "more than there is room for"
        limit = self.settings.max_requests
        assert limit is None or self.admitted <= limit

    def _check_epoch(self, asked: Ask, answer: Grant) -> None:
        if asked.handoff_epoch is not None:
            assert self.gate.state != "frozen"
            assert (answer.role, answer.epoch) == ("decode", asked.handoff_epoch)
            return
        assert self.gate.state == "open"
        if asked.min_version is not None:
            committed = [epoch for epoch, name in self.epochs.newest(10_000).items() if name == asked.min_version]
            assert answer.epoch >= min(committed)

    def given_back(self, ticket: int) -> Member:
        assert ticket in self.tickets, "given back twice"
        return self.tickets.pop(ticket)[0]

    def sent(self, client: Client, leg: SendLeg) -> None:
        assert client.live is None, "two live copies"
        assert not client.over, "sent for nobody"
        assert client.asked is not None
        second = client.asked.handoff_epoch is not None
        assert self.gate.state == "open" or (second and self.gate.state == "holding"), f"sent while {self.gate.state}"
        assert self.now <= leg.until <= leg.deadline == client.arrived_at + TIMEOUT_S
        body = json.loads(leg.body)
        assert body["cache_salt"] == self.salter.salt(leg.epoch, None)
        if second:
            assert leg.epoch == client.prefill_epoch, "a pair over two epochs"
        else:
            client.prefill_legs += 1
            assert client.prefill_legs <= 1 + RETRIES + client.readmitted
            client.prefill_epoch = leg.epoch if leg.role == "prefill" else None
        self._check_handoff(leg, body.get("kv_transfer_params") if leg.role == "decode" else None)
        client.live, client.sent_at, client.timer = leg, self.now, leg.until

    def _check_handoff(self, leg: SendLeg, transfer: Any) -> None:
        if transfer is None:
            assert leg.send_by is None
            return
        handoff = self.handoffs[transfer["number"]]
        assert not handoff.used, "a handoff used twice"
        assert handoff.epoch == leg.epoch, "a handoff of another epoch"
        assert self.now <= handoff.prefill_sent_at + LIFETIME_S == leg.send_by, "a handoff past its lease"
        handoff.used = True

    # -- at every moment -----------------------------------------------------------------------------------

    def check(self) -> None:
        self._check_load()
        self._check_waiting()
        assert self.dispatcher.admitted == self.admitted
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

    def _in_line(self) -> list[Client]:
        answered = {number for number, _ in self.dispatcher.outbox}
        found = [each for each in self.clients if each.waiting and each.number not in answered]
        assert len(found) == self.dispatcher.waiting
        return found

    def _could_go(self, client: Client) -> bool:
        asked = client.asked
        assert asked is not None
        if asked.handoff_epoch is not None:
            return self.gate.state != "frozen" and self._room("decode", asked.handoff_epoch)
        if self.gate.state != "open":
            return False
        limit = self.settings.max_requests
        if not client.admitted and limit is not None and self.admitted >= limit:
            return False
        known = self.epochs.newest(10_000)
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
