"""Which phases follow each other, and how long each may take.

    barrier   prefetch hold in_flight pause_prefill freeze pause_decode load COMMIT confirm publish resume open PURGE
    rolling   prefetch { choose drain pause_prefill pause_decode load confirm publish resume admit } COMMIT open PURGE
    join      { choose drain pause_prefill pause_decode load confirm publish resume admit } open

Turning back begins at `load` (barrier) or at `choose` (rolling), calling off at `resume`. Capitals: `COMMIT` sends
nothing, it is the record; the update is finished when `PURGE` begins, in which its trainer is released as well.
"""

from __future__ import annotations

from orchestrator.plan.weights import Limits
from orchestrator.spec.weights import Strategy
from orchestrator.weights.words import Course, Going, Phase

_BARRIER: tuple[Phase, ...] = ("load", "commit", "confirm", "publish", "resume", "open", "purge")
_MOVES: tuple[Phase, ...] = (
    "choose",
    "drain",
    "pause_prefill",
    "pause_decode",
    "load",
    "confirm",
    "publish",
    "resume",
    "admit",
)
_STILL: tuple[Phase, ...] = ("prefetch", "hold", "in_flight", "pause_prefill", "freeze", "pause_decode")
SEQUENCES: dict[tuple[Strategy, Going], tuple[Phase, ...]] = {
    ("barrier", "forward"): (*_STILL, *_BARRIER),
    ("barrier", "back"): _BARRIER,
    ("barrier", "off"): ("resume", "open", "purge"),
    ("rolling", "forward"): ("prefetch", *_MOVES, "commit", "open", "purge"),
    ("rolling", "back"): (*_MOVES, "commit", "open", "purge"),
    ("rolling", "off"): ("resume", "admit", "open", "purge"),
    ("rolling", "join"): (*_MOVES, "open"),
}
AFTER_GROUPS: dict[Going, Phase] = {"forward": "commit", "back": "commit", "join": "open"}
"""Where `choose` goes once nobody is left to move."""

CALLABLE_OFF: frozenset[Phase] = frozenset({"prefetch", "hold", "in_flight", "drain", "freeze"})
"""Phases that are given up, together with the update, where prefetches or the router take too long."""


def first_phase(strategy: Strategy, going: Going) -> Phase:
    return SEQUENCES[strategy, going][0]


def next_phase(course: Course) -> Phase | None:
    """None: the end. After `admit` the next group is chosen; what comes after the last group is `AFTER_GROUPS`."""
    sequence = SEQUENCES[course.update.strategy, course.going]
    if course.phase == "admit" and course.going != "off":
        return "choose"
    later = sequence[sequence.index(course.phase) + 1 :]
    return later[0] if later else None


def limit_s(phase: Phase, limits: Limits) -> float:
    seconds: dict[Phase, float] = {
        "prefetch": limits.prefetch_s,
        "hold": limits.hold_s,
        "in_flight": limits.in_flight_s,
        "drain": limits.drain_s,
        "pause_prefill": limits.pause_s,
        "freeze": limits.hold_s,
        "pause_decode": limits.pause_s,
        "load": limits.load_s,
        "purge": limits.grace_s + limits.command_s,
    }
    return seconds.get(phase, limits.command_s)
