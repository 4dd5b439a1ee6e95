"""What a receiver still lacks in a phase: one question per receiver, asked again after every answer.

Nothing here remembers what was sent. So a machine that was rebuilt from its journal goes on where the facts are.
"""

from __future__ import annotations

from connectors.types import Role
from connectors.weights.source import has_waiting_trainer
from orchestrator.weights.acts import (
    POOL,
    ROUTER,
    TRAINER,
    Ask,
    ConfirmEpoch,
    Dismiss,
    Drain,
    EngineAsk,
    HandleInFlight,
    Introduce,
    Load,
    Pause,
    PoolAsk,
    Prefetch,
    PublishEpoch,
    Purge,
    ReadEngine,
    ReadRouter,
    Release,
    Resume,
    RouterAsk,
    Serve,
    SetGate,
    Wipe,
)
from orchestrator.weights.groups import serves
from orchestrator.weights.knowledge import Knowledge
from orchestrator.weights.origin import origin, peer_to_ask
from orchestrator.weights.words import EngineFacts, Phase, RouterFacts

_PAUSED_IN: dict[Phase, tuple[Role, ...]] = {
    "pause_prefill": ("prefill",),
    "pause_decode": ("decode", "colocated"),
    "load": ("prefill", "decode", "colocated"),
}
"""Prefill first: its answers prove that no handoff is pending. Whoever came up since is paused before its load."""


def receivers(known: Knowledge) -> list[str]:
    return [ROUTER, *known.present(), POOL, TRAINER]


def need_of(receiver: str, known: Knowledge, *, is_due: bool) -> Ask | None:
    """`is_due`: the grace time for the epoch that was served until now is over."""
    if receiver == POOL:
        return _pool_need(known, is_due=is_due)
    if receiver == TRAINER:
        return _trainer_need(known)
    if receiver == ROUTER:
        return ReadRouter() if known.router is None else _router_need(known, known.router)
    engine = known.engines[receiver]
    if engine is None or engine.loading:
        return ReadEngine()
    if known.position.course is None:
        return None
    need = _engine_need(receiver, engine, known) if receiver in known.movers() else None
    if need is None and receiver == peer_to_ask(known):
        return Serve(instance=engine.instance)
    return need


def _engine_need(name: str, engine: EngineFacts, known: Knowledge) -> EngineAsk | None:
    course, target = known.course, known.target
    holds = known.held_version(engine) == target.version
    match course.phase:
        case "prefetch":
            wanted = course.update.load_mode == "cpu_prefetch" and not holds
            if wanted and name not in known.answered and name not in known.failed:
                return Prefetch(instance=engine.instance, source=target.source)
        case "pause_prefill" | "pause_decode" | "load":
            # Also where it is paused already: a resume or load that is still under way to it is older from now on.
            if known.fleet[name] in _PAUSED_IN[course.phase] and not (engine.paused and name in known.sealed):
                return Pause(instance=engine.instance, drops_handoffs=_is_without_readers(name, known))
            wants_load = course.phase == "load" and not holds and name not in known.failed
            if wants_load and (found := origin(known)) is not None:
                return Load(
                    instance=engine.instance,
                    source=found.source,
                    peer=found.peer,
                    mode=course.update.load_mode,
                    limit_s=course.update.limits.load_s,
                )
        case "confirm":
            if holds and engine.epoch != target.epoch:
                return ConfirmEpoch(instance=engine.instance, epoch=target.epoch)
        case "resume":
            # Also where it seems to run: a pause that is still under way to it is older from now on.
            if name in known.confirmed() and (engine.paused or name not in known.answered):
                return Resume(instance=engine.instance)
    return None


def _is_without_readers(name: str, known: Knowledge) -> bool:
    """Whether all legs have ended that could read this engine's handoffs: in a barrier, unless they are kept."""
    course = known.course
    is_barrier = course.going != "join" and course.update.strategy == "barrier"
    return is_barrier and course.update.in_flight != "keep" and known.fleet[name] == "prefill"


def _router_need(known: Knowledge, router: RouterFacts) -> RouterAsk | None:
    for name in sorted(known.withdrawn):
        if name in router.replicas and not router.replicas[name].draining:
            return Drain(name=name, draining=True, timeout_s=0.0)
    if known.position.course is None:
        return _membership(known, router)
    course, limits = known.course, known.course.update.limits
    is_answered = ROUTER in known.answered
    match course.phase:
        case "hold" if not is_answered:
            # Reading the gate proves nothing: a hold counts once every worker has acknowledged it. Never less closed.
            return SetGate(gate="frozen" if router.gate == "frozen" else "holding", timeout_s=limits.hold_s)
        case "in_flight" if not is_answered and router.gate == "holding":
            return HandleInFlight(mode=course.update.in_flight, timeout_s=limits.in_flight_s)
        case "freeze" if not is_answered:
            return SetGate(gate="frozen", timeout_s=limits.hold_s)
        case "choose" if ROUTER not in known.sealed:
            # Changes nothing, but an older drain that is still under way comes too late now: who serves is known.
            return SetGate(gate=router.gate, timeout_s=limits.command_s)
        case "drain":
            # Of all first: else one gets new legs for as long as those of another take to end.
            for timeout_s, done in ((0.0, _draining(router)), (limits.drain_s, known.answered)):
                waiting = [name for name in known.movers() if name in router.replicas and name not in done]
                if waiting:
                    return Drain(name=waiting[0], draining=True, timeout_s=timeout_s)
        case "publish":
            return _publication(known, router)
        case "admit" | "open":
            return _admission(known, router)
    return None


def _membership(known: Knowledge, router: RouterFacts) -> RouterAsk | None:
    """The router was started with the replicas of then."""
    for name in known.present():
        if name not in router.replicas:
            return Introduce(name=name)
    for name in router.replicas:
        if name not in known.fleet:
            return Dismiss(name=name)
    return None


def _draining(router: RouterFacts) -> set[str]:
    return {name for name, replica in router.replicas.items() if replica.draining}


def _publication(known: Knowledge, router: RouterFacts) -> RouterAsk | None:
    """First whoever did not arrive gets no more legs, then the router learns who did."""
    target, confirmed = known.target, known.confirmed()
    everyone = known.fleet if known.course.update.strategy == "barrier" else known.course.group
    for name in everyone:
        if name in router.replicas and name not in confirmed and not router.replicas[name].draining:
            return Drain(name=name, draining=True, timeout_s=0.0)
    told = {
        name: instance
        for name, instance in confirmed.items()
        if name in router.replicas
        and (router.replicas[name].instance, router.replicas[name].epoch) != (instance, target.epoch)
    }
    if not told:
        return None
    committed = known.position.committed.epoch
    return PublishEpoch(epoch=target.epoch, version=target.version, committed=committed, instances=told)


def _admission(known: Knowledge, router: RouterFacts) -> RouterAsk | None:
    """Legs again for whoever arrived; in the end the gate, if a pair serves."""
    for name in known.confirmed():
        if name in router.replicas and router.replicas[name].draining:
            return Drain(name=name, draining=False, timeout_s=0.0)
    arrived = {name: epoch for name, epoch in known.serving().items() if epoch == known.target.epoch}
    # Also where it is open: a command that closes it and is still under way is older from now on.
    is_settled = router.gate == "open" and ROUTER in known.answered
    if known.course.phase == "open" and not is_settled and serves(arrived, known.fleet):
        return SetGate(gate="open", timeout_s=known.course.update.limits.command_s)
    return None


def _pool_need(known: Knowledge, *, is_due: bool) -> PoolAsk | None:
    """Every epoch before the committed one, the oldest first; or all of them while everybody is paused. What an earlier
    update has left behind, whose purge gave way to this one, has had its time."""
    oldest = min(known.position.epochs)
    if known.position.course is None or oldest >= known.position.committed.epoch:
        return None
    course = known.course
    if known.wipes_pool:
        is_frozen = course.phase == "confirm" and course.update.strategy == "barrier"
        return Wipe() if is_frozen and POOL not in known.answered else None
    is_unread = is_due or oldest < course.epoch_before
    return Purge(epoch=oldest) if course.phase == "purge" and is_unread else None


def _trainer_need(known: Knowledge) -> Release | None:
    """However the update has ended. Who joins later loads from a peer, so a dead engine holds no trainer up."""
    course = known.position.course
    if course is None or course.phase != "purge" or TRAINER in known.answered:
        return None
    return Release(source=course.update.source) if has_waiting_trainer(course.update.source) else None
