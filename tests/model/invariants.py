"""What must hold, each checked by the move that could break it. Numbers are those of the design's invariants."""

from __future__ import annotations

from collections.abc import Collection

from tests.model.engine import EXPIRED, TORN
from tests.model.fleet import ENGINES
from tests.model.world import Handoff, Key, Leg, State, Violated

_NO_VERSION = {EXPIRED, TORN}


def check_kv(leg: Leg, *, is_kept: bool) -> None:
    """1: a leg stands on KV of its epoch's weights, unless its reply will say that it lived through an update."""
    wrong = leg.weights & _NO_VERSION if is_kept else leg.weights - {leg.version}
    if wrong:
        raise Violated(
            f"1: the {leg.role} leg at {ENGINES[leg.engine]} is of epoch {leg.epoch} ({leg.version}), and its KV was "
            f"computed from {', '.join(sorted(wrong))}"
        )


def check_reply(told: Collection[str], versions: Collection[str], *, is_single: bool, is_kept: bool) -> None:
    """1: the label names every version that tokens are from."""
    if is_single and not set(told) <= set(versions):
        raise Violated(f"1: a reply of {sorted(told)} says that it is of {list(versions)} alone")
    if not is_kept and not set(told) <= set(versions):
        raise Violated(f"1: a reply of {sorted(told)} says that it is of {list(versions)}")


def check_saved(state: State, epoch: int, key: Key) -> None:
    """1: what is saved under an epoch was computed from its weights."""
    if (epoch, key.weights) not in state.promised:
        raise Violated(f"1: a block computed from {key.weights} is saved under epoch {epoch}")
    other = next((each.weights for each in state.pool if each[:2] == key[:2] and each.weights != key.weights), None)
    if other is not None:
        raise Violated(f"1: blocks computed from {key.weights} and from {other} are saved under epoch {epoch}")


def check_epochs(promised: Collection[tuple[int, str]]) -> None:
    """1 rests on it: an epoch is given out once."""
    if len({epoch for epoch, _ in promised}) < len(promised):
        raise Violated(f"1: an epoch stands for two versions: {sorted(promised)}")


def check_pair(leg: Leg, handoff: Handoff | None) -> None:
    """2: a D leg belongs to the epoch of its handoff, whose lease is not over."""
    if not leg.has_handoff:
        return
    assert handoff is not None, "a handoff from nowhere"
    if leg.epoch != handoff.epoch:
        raise Violated(f"2: a D leg of epoch {leg.epoch} is sent with a handoff of epoch {handoff.epoch}")
    if not handoff.is_fresh:
        raise Violated("2: a D leg is sent with a handoff whose lease is over")


def check_fences(state: State) -> None:
    """3 and 4: an engine whose fence is open for an epoch holds its weights, whole."""
    for name, engine in zip(ENGINES, state.engines, strict=True):
        is_open = engine.is_up and engine.epoch is not None and not engine.torn and not engine.lost
        if is_open and (engine.epoch, engine.weights) not in state.promised:
            raise Violated(f"3: {name} is confirmed for epoch {engine.epoch} and holds {engine.weights}")


def check_written(engine: int, legs: int, *, is_paused: bool) -> None:
    """4: nothing is computed while weights are being written."""
    if legs and not is_paused:
        raise Violated(f"4: the weights of {ENGINES[engine]} are written while {legs} legs run there")


def check_committed(state: State, version: str, present: Collection[int]) -> None:
    """4: the version moves when everyone holds it."""
    for number in present:
        engine = state.engines[number]
        if engine.is_up and engine.weights != version:
            raise Violated(f"4: {version} is committed, and {ENGINES[number]} holds {engine.weights}")


def check_abort(state: State, leg: Leg) -> None:
    """A27: an abort that reaches a paused engine can kill it."""
    if leg.stage != "air" and state.engines[leg.engine].paused != "no":
        raise Violated(f"A27: a leg is aborted at {ENGINES[leg.engine]}, which is paused")


def check_purged(before: Collection[Key], after: Collection[Key], epoch: int) -> None:
    """A purge takes what is of its epoch, and nothing else."""
    left = {each for each in before if each.epoch != epoch}
    if set(after) != left:
        wrong = "took blocks of another epoch" if left - set(after) else "left blocks of that epoch"
        raise Violated(f"purge: that of epoch {epoch} {wrong}")
