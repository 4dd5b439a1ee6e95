"""Who serves, and who may move next in a rolling update: at least one pair of some epoch always serves."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from itertools import product

from orchestrator.spec.weights import Strategy
from orchestrator.weights.words import EngineFacts, Fleet, RouterFacts


def has_pair(names: Iterable[str], fleet: Fleet) -> bool:
    """Could these engines, in one epoch, serve a request?"""
    roles = {fleet[name] for name in names}
    return "colocated" in roles or {"prefill", "decode"} <= roles


def serving(engines: Mapping[str, EngineFacts | None], router: RouterFacts) -> dict[str, int]:
    """Engines that take requests now -> their epoch."""
    found = {}
    for name, engine in engines.items():
        replica = router.replicas.get(name)
        if engine is None or engine.epoch is None or replica is None or engine.unfit or engine.paused:
            continue
        if not replica.draining and (replica.instance, replica.epoch) == (engine.instance, engine.epoch):
            found[name] = engine.epoch
    return found


def serves(names: Mapping[str, int], fleet: Fleet) -> bool:
    """Is there a pair within one epoch?"""
    return any(has_pair((name for name in names if names[name] == epoch), fleet) for epoch in set(names.values()))


def update_refusal(fleet: Fleet, withdrawn: Collection[str], strategy: Strategy, *, wipes_pool: bool) -> str:
    """Why this fleet cannot be updated so, without those that get no requests now; empty where it can."""
    left = {name: role for name, role in fleet.items() if name not in withdrawn}
    if not has_pair(left, fleet):
        told = ", ".join(name for name in fleet if name in withdrawn)
        return f"no pair of engines is left to load new weights without those drained or restarted now: {told}"
    return _rolling_refusal(left, wipes_pool=wipes_pool) if strategy == "rolling" else ""


def _rolling_refusal(fleet: Fleet, *, wipes_pool: bool) -> str:
    if wipes_pool:
        return (
            "rolling needs pool keys that carry the epoch, and engines with a kv_transfer_config of the job file's own"
            " have none: their pool is wiped while a barrier holds everybody"
        )
    if _first_groups(fleet, fleet):
        return ""
    counts = {role: sum(each == role for each in fleet.values()) for role in ("prefill", "decode", "colocated")}
    told = ", ".join(f"{count} {role}" for role, count in counts.items() if count)
    return f"rolling needs a second pair of engines that serves while the first one loads; this fleet has {told}"


def next_group(
    *, fleet: Fleet, waiting: Collection[str], now_serving: Mapping[str, int], epoch: int, pairs: int
) -> tuple[str, ...]:
    """Who of those waiting for `epoch` goes next; empty where nobody may go now.

    Who does not serve costs nothing and goes first. Then, until the new epoch has a pair, one pair that leaves
    another behind; afterwards as many as asked for, since the new epoch serves meanwhile.
    """
    idle = tuple(name for name in fleet if name in waiting and name not in now_serving)
    if idle:
        return idle
    busy = {name: fleet[name] for name in fleet if name in waiting}
    if not serves(now_serving, fleet):
        return tuple(busy)
    in_epoch = [name for name in now_serving if now_serving[name] == epoch]
    if has_pair(in_epoch, fleet):
        return _chunk(busy, pairs)
    lacking = [group for group in _first_groups(busy, fleet, have=in_epoch) if _leaves_pair(group, now_serving, fleet)]
    return min(lacking, key=len, default=())


def _first_groups(movable: Fleet, fleet: Fleet, have: Collection[str] = ()) -> list[tuple[str, ...]]:
    """Groups that give a new epoch its first pair, together with those it has, and leave one within the fleet."""
    alone = [(name,) for name in movable]
    couples = [(p, d) for p, d in product(movable, movable) if (movable[p], movable[d]) == ("prefill", "decode")]
    return [
        group
        for group in [*alone, *couples]
        if has_pair([*have, *group], fleet) and has_pair([name for name in fleet if name not in group], fleet)
    ]


def _leaves_pair(group: Collection[str], now_serving: Mapping[str, int], fleet: Fleet) -> bool:
    return serves({name: epoch for name, epoch in now_serving.items() if name not in group}, fleet)


def _chunk(movable: Fleet, pairs: int) -> tuple[str, ...]:
    """So many of each role."""
    chosen: list[str] = []
    for name, role in movable.items():
        if sum(movable[each] == role for each in chosen) < pairs:
            chosen.append(name)
    return tuple(chosen)
