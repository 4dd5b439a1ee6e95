"""Commands at the router: its shell as `router/io/admin.py` and `crew.py` have it, on the real dispatcher."""

from __future__ import annotations

from collections.abc import Iterator

from orchestrator.weights.acts import Drain, HandleInFlight, PublishEpoch, ReadRouter, SetGate
from orchestrator.weights.words import ReplicaFacts, RouterFacts
from router.core.gate import Gate, GateState
from tests.model.coordinator import Event
from tests.model.core import Result
from tests.model.fleet import ENGINES, NUMBER, ROUTER_NUMBER, instance, life_of
from tests.model.plain import freeze, read
from tests.model.steps import coordinate, overtaken, reply
from tests.model.traffic import Move, answered, told
from tests.model.world import GateMoved, Granted, Interrupts, Late, Model, Op, State


def at_router(model: Model, state: State, command: Late, *, is_awaited: bool) -> Iterator[Move]:
    ask = read(command.ask)
    if isinstance(ask, ReadRouter):
        event = Event("router read", ROUTER_NUMBER, freeze(_router_facts(state)))
        yield from reply(model, state, event, "", is_awaited=is_awaited)
        return
    if isinstance(ask, SetGate | HandleInFlight) and state.op is not None:
        return  # It waits until the one before is done.
    is_refused = not _accepts(state.router_order, command.attempt) and model.removed != "fencing numbers"
    if is_refused or (isinstance(ask, HandleInFlight) and state.core.gate != "holding"):
        yield from reply(model, state, Event("refused", ROUTER_NUMBER), ": refused", is_awaited=is_awaited)
        return
    state = state._replace(router_order=command.attempt)
    if is_awaited:
        state = overtaken(model, state, ROUTER_NUMBER)
    match ask:
        case PublishEpoch(epoch=epoch, version=version, instances=instances):
            lives = tuple((NUMBER[name], life_of(each)) for name, each in sorted(instances.items()))
            results = model.cores.publish(state.core, epoch, version, lives)
            kind = "answered" if results else "refused"
            for result in results or [(state.core, ())]:
                after = answered(state, result)
                yield from reply(model, after, Event(kind, ROUTER_NUMBER), f": {kind}", is_awaited=is_awaited)
        case Drain(name=name, draining=draining):
            for result in model.cores.drain(state.core, NUMBER[name], draining):
                after = answered(state, result)
                if draining and is_awaited:
                    yield f" ({name})", after._replace(taken=after.taken | {ROUTER_NUMBER})
                else:
                    event = Event("answered", ROUTER_NUMBER)
                    yield from reply(model, after, event, f" ({name})", is_awaited=is_awaited)
        case SetGate(gate=gate):
            for after in _move_gate(model, state, gate):
                taken = after.taken | {ROUTER_NUMBER} if is_awaited else after.taken
                yield f" ({gate})", after._replace(op=Op(gate, None), taken=taken)
        case HandleInFlight(mode=mode):
            if mode != "wait":
                for number in range(len(state.sessions)):
                    state = told(state, number, Interrupts(mode))
            taken = state.taken | {ROUTER_NUMBER} if is_awaited else state.taken
            yield "", state._replace(op=Op(None, mode), taken=taken)


def _accepts(taken: tuple[int, int], attempt: tuple[int, int]) -> bool:
    gate = Gate()
    gate.take((*taken, 0))
    return gate.accepts((*attempt, 1))


def _move_gate(model: Model, state: State, gate: GateState) -> list[State]:
    """The dispatcher closes before the workers know, and opens after."""
    results: list[Result] = [(state.core, ())]
    if gate != "open":
        results = model.cores.set_gate(state.core, gate)
    states = [answered(state, each) for each in results]
    for number in range(len(state.sessions)):
        states = [told(each, number, GateMoved(gate)) for each in states]
    return states


def finished(model: Model, state: State, op: Op) -> list[State] | None:
    """The states in which a command of the router has been carried out; None while it is not."""
    mailboxes = [each.mailbox for each in state.sessions]
    reached = [not any(isinstance(message, GateMoved | Interrupts) for message in box) for box in mailboxes]
    everyone = any(reached) if model.removed == "hold acknowledged by all workers" else all(reached)
    if op.in_flight == "wait":
        is_busy = any(
            each.leg is not None or any(isinstance(message, Granted) for message in each.mailbox)
            for each in state.sessions
        )
        between = any(place is not None and (place.waits_for or -1) >= 0 for place in state.core.places)
        return None if is_busy or between else [state]
    if not everyone:
        return None
    if op.gate == "open":
        return [answered(state, each) for each in model.cores.set_gate(state.core, "open")]
    is_settled = not any(each.leg is not None and each.leg.stage == "air" for each in state.sessions)
    return [state] if op.gate is None or is_settled else None


def drained(model: Model, state: State) -> Iterator[Move]:
    sent = model.coordinators.open[state.coordinator].get(ROUTER_NUMBER)
    if sent is None or ROUTER_NUMBER not in state.taken or sent.ask[0] is not Drain:
        return
    drain = read(sent.ask)
    held = [each for place in state.core.places if place is not None for each in place.held]
    if drain.timeout_s == 0 or NUMBER[drain.name] not in held:
        for after in coordinate(model, state, Event("answered", ROUTER_NUMBER)):
            yield f"drain of {drain.name}: answered", after


def _router_facts(state: State) -> RouterFacts:
    replicas = {
        name: ReplicaFacts(
            instance=instance(number, each.life) if each.life >= 0 else "", epoch=each.epoch, draining=each.draining
        )
        for number, (name, each) in enumerate(zip(ENGINES, state.core.replicas, strict=True))
    }
    return RouterFacts(gate=state.core.gate, replicas=replicas)
