"""An engine: the fence's and the verdict's real rules over a small model of what vLLM does behind them.

The rules are `connectors/vllm_plugin/fence_rules.py`, `weight_rules.py` and `weights/verdict.py`. The model: parameters
hold one version's weights or none (`TORN`), two ranks load them and agree, a pause ends when no handoff of the engine
is left to be read, and every block that was computed may stay in the local cache and be saved to the pool later.
"""

from __future__ import annotations

import json
from functools import cache
from typing import Any, Literal, NamedTuple

from connectors.vllm_plugin.fence_rules import (
    EPOCH_HEADER,
    INSTANCE_HEADER,
    ORDER_HEADER,
    SALTED_HEADER,
    Answer,
    FenceState,
    Headers,
)
from connectors.vllm_plugin.weight_rules import apply_verdict, load_refusal
from connectors.vllm_plugin.weights.verdict import RankReport, judge
from orchestrator.weights.acts import ConfirmEpoch, Load, Pause, Prefetch, ReadEngine, Resume, Serve
from orchestrator.weights.receivers import FIRST_VERSION
from orchestrator.weights.words import EngineFacts
from tests.model.coordinator import Event
from tests.model.fleet import ENGINES, instance
from tests.model.plain import Frozen, freeze, read

TORN, EXPIRED, MIXED = "torn", "expired", "mixed"
"""What KV can be computed from beside a version's weights: those of no version at all; what a D leg finds where a
handoff's lease is over (other requests' blocks); and, in a request that lived through an update, several versions."""
LoadEnd = Literal["done", "untouched", "torn"]
_RANKS = 2


class Block(NamedTuple):
    """KV that is filed under a salt."""

    epoch: int
    """Of the request that it was computed for, at its admission."""
    salt: int
    weights: str
    """What it was computed from."""


class Engine(NamedTuple):
    life: int
    is_up: bool
    weights: str
    """What really is in the parameters."""
    epoch: int | None = None
    version: str | None = None
    torn: bool = False
    lost: bool = False
    paused: Literal["no", "pausing", "yes"] = "no"
    order: tuple[int, int] = (0, 0)
    """(update, attempt) of the newest command that was obeyed."""
    serves: bool = False
    """Its weights, to peers."""
    drops: bool = False
    """Whatever handoffs it makes, their leases end at once."""
    blocks: frozenset[Block] = frozenset()

    @property
    def is_open(self) -> bool:
        return self.is_up and self.epoch is not None and not self.torn and not self.lost and self.paused == "no"


class Obeyed(NamedTuple):
    engine: Engine
    answer: Event | None
    """None: it comes when the pause has ended."""
    is_written: bool = False
    """A load began to write."""
    is_taken: bool = True
    """Older commands come too late from now on."""


def first_engine() -> Engine:
    return Engine(life=0, is_up=True, weights=FIRST_VERSION, epoch=1)


def ended(engine: Engine) -> Engine:
    """Its process is gone, and with it all that it held."""
    return Engine(life=engine.life, is_up=False, weights="")


def booted(engine: Engine, *, epoch: int | None) -> Engine:
    """Another life, with the weights that all start with, confirmed for no epoch unless its fence boots open."""
    return Engine(life=engine.life + 1, is_up=True, weights=FIRST_VERSION, epoch=epoch)


@cache
def lets_in(engine: Engine, number: int, life: int, epoch: int) -> bool:
    """Does the fence let a salted leg pass that is meant for this life and epoch?"""
    headers: Headers = {
        INSTANCE_HEADER.encode(): instance(number, life).encode(),
        EPOCH_HEADER.encode(): b"%d" % epoch,
        SALTED_HEADER.encode(): b"1",
    }
    return _fence(engine, number).refusal(headers) is None


@cache
def obey(
    engine: Engine, number: int, attempt: tuple[int, int], ask: Frozen, *, legs: int, is_quiet: bool, end: LoadEnd,
    brought: str, hears_all_ranks: bool,
) -> Obeyed:  # fmt: skip
    """Carry a command out. `legs` run there; `is_quiet`: no handoff is left to be read; `end`: of a load; `brought`:
    whose weights it really gets."""
    asked = read(ask)
    if isinstance(asked, ReadEngine):
        return Obeyed(engine, Event("engine read", number, freeze(_facts(engine, number))), is_taken=False)
    fence = _fence(engine, number)
    fence.open_requests = dict.fromkeys(range(legs), "")
    order = (*attempt, 1)
    if isinstance(asked, ConfirmEpoch):
        update, attempts, step = order
        body = {"instance": asked.instance, "epoch": asked.epoch, "update": update, "attempt": attempts, "step": step}
        command = fence.receive(json.dumps(body).encode())
        if isinstance(command, Answer):
            return Obeyed(engine, Event("refused", number), is_taken=False)
        fence.confirm(command)
        return Obeyed(engine._replace(epoch=fence.epoch, order=attempt), Event("answered", number))
    if isinstance(asked, Pause | Resume):
        headers = {
            INSTANCE_HEADER.encode(): asked.instance.encode(),
            ORDER_HEADER.encode(): ".".join(map(str, order)).encode(),
        }
        refusal = fence.refused_move(headers)
    else:
        refusal = fence.conflict(asked.instance, order)
    if refusal is not None:
        return Obeyed(engine, Event("refused", number), is_taken=False)
    engine = engine._replace(order=attempt)
    match asked:
        case Prefetch():
            return Obeyed(engine, Event("answered", number))
        case Pause() if is_quiet or engine.paused == "yes":
            return Obeyed(engine._replace(paused="yes"), Event("answered", number))
        case Pause():
            return Obeyed(engine._replace(paused="pausing"), None)
        case Resume():
            return Obeyed(engine._replace(paused="no"), Event("answered", number))
        case Serve():
            can = engine.version is not None and not engine.torn
            return Obeyed(engine._replace(serves=can), Event("answered" if can else "refused", number))
        case Load():
            if load_refusal(fence) is not None:
                return Obeyed(engine, Event("refused", number))
            version = str(asked.source["version"])
            return _loaded(engine, fence, number, version, end, brought=brought, hears_all_ranks=hears_all_ranks)
    raise AssertionError(asked)


def _loaded(
    engine: Engine, fence: FenceState, number: int, version: str, end: LoadEnd, *, brought: str, hears_all_ranks: bool
) -> Obeyed:
    before, fence.epoch = fence.epoch, None
    heard = [_report(0, version if end == "done" else engine.version, end)]
    if hears_all_ranks:
        heard.append(_report(1, version if end == "done" else engine.version, end))
    elif end == "torn":
        heard = [_report(0, version, "done")]
    verdict = judge("call", [each.to_wire() for each in heard], len(heard))
    apply_verdict(fence, verdict)
    if not verdict.ok and not fence.unfit():
        fence.epoch = before
    after = engine._replace(
        weights={"done": brought, "untouched": engine.weights, "torn": TORN}[end],
        serves=False,
        epoch=fence.epoch,
        version=fence.version,
        torn=bool(fence.torn),
        lost=bool(fence.lost),
    )
    return Obeyed(after, Event("answered" if verdict.ok else "refused", number), is_written=end != "untouched")


def _report(rank: int, version: str | None, end: LoadEnd) -> RankReport:
    """What a rank says after all ranks have agreed."""
    return RankReport(
        call="call",
        rank=rank,
        ranks=_RANKS,
        ok=end == "done",
        error="" if end == "done" else "rank 1: no bytes",
        version=version,
        torn="rank 1: no bytes" if end == "torn" else "",
    )


def _facts(engine: Engine, number: int) -> EngineFacts:
    fence = _fence(engine, number)
    return EngineFacts(
        instance=fence.instance,
        epoch=fence.epoch,
        version=fence.version or FIRST_VERSION,
        unfit=fence.unfit(),
        paused=engine.paused == "yes",
        loading=False,
        lost=bool(fence.lost),
        served={"version": engine.version, "peer": ENGINES[number]} if engine.serves else None,
    )


def _fence(engine: Engine, number: int) -> FenceState:
    made: dict[str, Any] = {"torn": "torn" if engine.torn else "", "lost": "lost" if engine.lost else ""}
    return FenceState(
        instance=instance(number, engine.life),
        epoch=engine.epoch,
        order=(*engine.order, 0),
        paused=engine.paused != "no",
        version=engine.version,
        **made,
    )
