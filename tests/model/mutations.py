"""Safeguards, each taken away alone: the exploration named beside it has to find a violation then.

A safeguard of the model (an engine's or a store's, or a shell's) is a name that the model asks for; one of the real
cores is a patch of them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any
from unittest.mock import patch

from connectors.vllm_plugin.fence_rules import INSTANCE_HEADER, Answer, FenceState, Headers
from orchestrator.weights import needs
from orchestrator.weights.knowledge import Knowledge
from orchestrator.weights.words import EngineFacts
from router.core.asks import Ask, Grant, Refusal
from router.core.dispatcher import Dispatcher, Lane, _Request
from router.core.epochs import Salter
from router.core.legs import Legs
from tests.model.engine import lets_in, obey
from tests.model.fleet import Setup

Patch = tuple[object, str, Any]


@dataclass(frozen=True, kw_only=True)
class Mutation:
    """A safeguard that is missing."""

    safeguard: str
    without: str
    """What happens in its place."""
    setup: Setup
    patches: tuple[Patch, ...] = ()
    tools: Mapping[str, float] = field(default_factory=dict)
    """Changes of the rules that flows obey."""

    @contextmanager
    def applied(self) -> Iterator[None]:
        with ExitStack() as stack:
            for owner, name, value in self.patches:
                stack.enter_context(patch.object(owner, name, value))
            _forget()
            yield
        _forget()


def _forget() -> None:
    lets_in.cache_clear()
    obey.cache_clear()


class _FirstSalt:
    """The salt of a request's first leg, whatever comes."""

    def __init__(self, salter: Salter) -> None:
        self._salter = salter
        self._epoch: int | None = None

    def salt(self, epoch: int, client_salt: str | None) -> str:
        self._epoch = epoch if self._epoch is None else self._epoch
        return self._salter.salt(self._epoch, client_salt)


def _legs_with_first_salt(legs: Legs, *arguments: Any) -> None:
    _LEGS_INIT(legs, *arguments)
    legs._salter = _FirstSalt(legs._salter)  # type: ignore[assignment]


def _second_anywhere(
    dispatcher: Dispatcher, request: _Request, ask: Ask, _epoch: int, now: float
) -> Grant | Refusal | Lane:
    if not dispatcher.gate.may_continue:
        return ("gate", 0)
    return dispatcher._place(request, ask, "decode", sorted(dispatcher.fleet._indexes["decode"], reverse=True), now)


def _conflict_of_any_instance(fence: FenceState, _instance: str, order: tuple[int, int, int]) -> Answer | None:
    return _CONFLICT(fence, fence.instance, order)


def _conflict_of_any_order(fence: FenceState, instance: str, _order: tuple[int, int, int]) -> Answer | None:
    return _CONFLICT(fence, instance, fence.order or (0, 0, 0))


def _differences_of_any_instance(fence: FenceState, headers: Headers) -> dict[str, str]:
    return {name: why for name, why in _DIFFERENCES(fence, headers).items() if name != INSTANCE_HEADER}


def _held_or_not_failed(known: Knowledge, engine: EngineFacts) -> str | None:
    held = _HELD_VERSION(known, engine)
    course = known.position.course
    if course is not None and course.going == "back" and held == course.update.version:
        return known.position.committed.version
    return held


_LEGS_INIT = Legs.__init__
_CONFLICT = FenceState.conflict
_DIFFERENCES = FenceState._differences
_HELD_VERSION = Knowledge.held_version
_ALL_AT_ONCE = needs._PAUSED_IN | {"pause_prefill": ("prefill", "decode", "colocated")}

_BARRIER = Setup(strategy="barrier", in_flight="readmit", fault="none", turns=(1, 0), updates=1)
_KEEP = replace(_BARRIER, in_flight="keep")
_ROLLING = replace(_BARRIER, strategy="rolling")

MUTATIONS = (
    Mutation(
        safeguard="salt at dispatch",
        without="a request has the salt of its first leg, also when it is run again in another epoch",
        setup=_BARRIER,
        patches=((Legs, "__init__", _legs_with_first_salt),),
    ),
    Mutation(
        safeguard="epoch in keys",
        without="keys have the job's prefix only, and so has a purge",
        setup=_BARRIER,
    ),
    Mutation(
        safeguard="no saves from older requests",
        without="a block is saved under the engine's epoch, whichever it was computed in",
        setup=_BARRIER,
    ),
    Mutation(
        safeguard="pause answer before the next step",
        without="a pause counts from the moment that it is received",
        setup=_KEEP,
    ),
    Mutation(
        safeguard="P before D",
        without="all engines are paused at once, so a D leg may wait for its handoff until that has expired",
        setup=_KEEP,
        patches=((needs, "_PAUSED_IN", _ALL_AT_ONCE),),
    ),
    Mutation(
        safeguard="drops end with the pause",
        without="a prefill engine that was resumed before its pause had ended goes on dropping handoffs",
        setup=replace(_BARRIER, fault="cancel"),
    ),
    Mutation(
        safeguard="nothing is closed while requests are kept",
        without="the leg of a client that leaves is closed until the gate is frozen, when engines pause already",
        setup=replace(_KEEP, fault="client"),
    ),
    Mutation(
        safeguard="handoff age",
        without="the router sends a handoff however old it is",
        setup=replace(_BARRIER, is_fine=True),
        tools={"lifetime_s": 1e6},
    ),
    Mutation(
        safeguard="pair by epoch",
        without="a D leg goes to any decode replica",
        setup=_ROLLING,
        patches=((Dispatcher, "_decide_second", _second_anywhere),),
    ),
    Mutation(
        safeguard="instance check",
        without="an engine obeys commands and serves legs that are meant for another life of it",
        setup=replace(_BARRIER, fault="reborn"),
        patches=(
            (FenceState, "conflict", _conflict_of_any_instance),
            (FenceState, "_differences", _differences_of_any_instance),
        ),
    ),
    Mutation(
        safeguard="boot fence",
        without="an engine starts confirmed for the newest epoch, with the weights that it starts with",
        setup=replace(_BARRIER, fault="engine"),
    ),
    Mutation(
        safeguard="hold acknowledged by all workers",
        without="the router answers when one worker has obeyed",
        setup=replace(_KEEP, turns=(1, 1), is_fine=True),
    ),
    Mutation(
        safeguard="verdict from all ranks",
        without="the first rank speaks for the engine",
        setup=replace(_BARRIER, fault="load"),
    ),
    Mutation(
        safeguard="journal before act",
        without="what follows a record is carried out before the record is written",
        setup=replace(_BARRIER, fault="coordinator", updates=2),
    ),
    Mutation(
        safeguard="fencing numbers",
        without="receivers obey late commands of a coordinator that is gone",
        setup=replace(_BARRIER, fault="coordinator", updates=2),
        patches=((FenceState, "conflict", _conflict_of_any_order),),
    ),
    Mutation(
        safeguard="whole-fleet roll back",
        without="only engines whose load failed go back, the others are taken to be there",
        setup=replace(_BARRIER, fault="load"),
        patches=((Knowledge, "held_version", _held_or_not_failed),),
    ),
)
