"""Carries a coordinator's commands out: to engines, router, pool and trainer. Whatever happens, one event comes back.

`runner.py` calls it in a thread per command. What a receiver says of its own act is an answer; everything that proves
neither the one nor the other is a lost outcome, after which the machine reads the receiver back.
"""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass

from connectors.engine_client import (
    CommandOrder,
    EngineCallFailed,
    EngineClient,
    EngineRefused,
    LoadOptions,
    WeightsAnswer,
)
from connectors.pool_client import PoolCallFailed, PoolClient
from connectors.weights.nixl.client import release
from connectors.weights.source import FetchError, SourceInfo, numbered
from orchestrator.plan.types import EnginePlan, JobPlan
from orchestrator.plan.weights import Limits
from orchestrator.weights import acts
from orchestrator.weights.acts import Command, EngineAsk, PoolAsk, RouterAsk
from orchestrator.weights.events import Answered, EngineRead, Event, OutcomeLost, RouterRead
from orchestrator.weights.router_client import RouterCallFailed, RouterClient, RouterRefused
from orchestrator.weights.words import EngineFacts, Order

LOOK_EVERY_S = 0.5
FIRST_VERSION = "initial"
"""Of the weights that every life of an engine starts with, those of the job file's model. No push may name its so."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Receivers:
    """Those of one job."""

    plan: JobPlan

    @property
    def _limits(self) -> Limits:
        return self.plan.weights.limits

    def carry_out(self, command: Command) -> Event:
        order, ask = command.order, command.ask
        try:
            match ask:
                case acts.Purge() | acts.Wipe():
                    self._clear_pool(ask)
                    return Answered(order=order)
                case acts.Release():
                    self._release(ask)
                    return Answered(order=order)
                case (
                    acts.ReadRouter()
                    | acts.SetGate()
                    | acts.HandleInFlight()
                    | acts.Drain()
                    | acts.Introduce()
                    | acts.Dismiss()
                    | acts.PublishEpoch()
                ):
                    with RouterClient(self.plan.router) as router:
                        return self._tell_router(router, ask, order)
                case _:
                    return self._tell_engine(self._engine(command.receiver), ask, order)
        except (EngineRefused, RouterRefused, PoolCallFailed) as refused:
            return Answered(order=order, error=str(refused))
        except (EngineCallFailed, RouterCallFailed) as error:
            _log.info("%s: %s", command.receiver, error)
            return OutcomeLost(order=order)

    def _clear_pool(self, ask: PoolAsk) -> None:
        """Raises `PoolCallFailed`."""
        pool = self.plan.pool
        if pool is None:
            return
        client = PoolClient(python=pool.python, master_address=pool.master_address, metrics_url=pool.metrics_url)
        match ask:
            case acts.Purge():
                client.purge_epoch(pool.cache_prefix, ask.epoch, self._limits.command_s)
            case acts.Wipe():
                client.wipe(self._limits.command_s)

    def _release(self, ask: acts.Release) -> None:
        """A trainer that cannot be told is gone, or goes on when its own time is over."""
        try:
            release(ask.source, self._limits.command_s)
        except FetchError as error:
            _log.info("version %s: its trainer was not released: %s", ask.source["version"], error)

    def _source_for(self, engine: EnginePlan, source: SourceInfo) -> SourceInfo:
        """The ranks of all engines are numbered in the plan's order, so that an engine has the same numbers in every
        load and plans its reads once."""
        engines = self.plan.engines
        before = engines[: engines.index(engine)]
        return numbered(
            source, first_reader=sum(each.ranks for each in before), readers=sum(each.ranks for each in engines)
        )

    def _engine(self, name: str) -> EnginePlan:
        return next(each for each in self.plan.engines if each.name == name)

    def _tell_router(self, router: RouterClient, ask: RouterAsk, order: Order) -> Event:
        """Raises `RouterCallFailed`."""
        match ask:
            case acts.ReadRouter():
                return RouterRead(order=order, facts=router.state())
            case acts.SetGate():
                router.set_gate(ask.gate, order, ask.timeout_s)
            case acts.HandleInFlight():
                router.handle_in_flight(ask.mode, order, ask.timeout_s)
            case acts.Drain():
                legs = router.drain(ask.name, order, draining=ask.draining, timeout_s=ask.timeout_s)
                if legs and ask.draining and ask.timeout_s:
                    return Answered(order=order, error=f"{legs} requests still run on {ask.name}")
            case acts.Introduce():
                engine = self._engine(ask.name)
                router.add(engine.name, engine.role, engine.url, order)
            case acts.Dismiss():
                router.remove(ask.name, order)
            case acts.PublishEpoch():
                router.publish(ask.epoch, ask.version, ask.instances, order, committed=ask.committed)
        return Answered(order=order)

    def _tell_engine(self, engine: EnginePlan, ask: EngineAsk, order: Order) -> Event:
        """Raises `EngineCallFailed`."""
        given = CommandOrder(**order._asdict())
        with EngineClient(engine.url, engine.token_file, timeout_s=self._limits.command_s) as client:
            match ask:
                case acts.ReadEngine():
                    return EngineRead(order=order, facts=_read(client, takes_weights=self.plan.weights.in_place))
                case acts.Pause():
                    client.pause(ask.instance, given, self._limits.pause_s, drops_handoffs=ask.drops_handoffs)
                case acts.Resume():
                    client.resume(ask.instance, given)
                case acts.ConfirmEpoch():
                    client.confirm_epoch(ask.instance, ask.epoch, given)
                case acts.Prefetch():
                    return self._prefetch(client, ask, self._source_for(engine, ask.source), order)
                case acts.Serve():
                    return _verdict(order, client.serve_weights(ask.instance, given))
                case acts.Load():
                    options = LoadOptions(mode=ask.mode, limit_s=ask.limit_s)
                    source = self._source_for(engine, ask.source)
                    return _verdict(order, client.load_weights(ask.instance, source, given, options))
        return Answered(order=order)

    def _prefetch(self, client: EngineClient, ask: acts.Prefetch, source: SourceInfo, order: Order) -> Event:
        """The engine answers at once, and then has to be asked how far it is."""
        deadline = time.monotonic() + self._limits.prefetch_s
        options = LoadOptions(limit_s=self._limits.prefetch_s)
        answer = client.prefetch_weights(ask.instance, source, CommandOrder(**order._asdict()), options)
        while answer.ok and any(rank.phase == "prefetching" for rank in answer.ranks):
            if time.monotonic() > deadline:
                return OutcomeLost(order=order)
            time.sleep(LOOK_EVERY_S)
            answer = client.weights()
        unready = [rank for rank in answer.ranks if rank.prefetched != source["version"]]
        if not answer.ok or not unready:
            return _verdict(order, answer)
        return Answered(order=order, error=unready[0].error or "the copy was given up")


def _read(client: EngineClient, *, takes_weights: bool) -> EngineFacts:
    """Raises `EngineCallFailed`, also where the answers are of two lives."""
    before, served = client.fence(), None
    if takes_weights and not before.running:
        # What the fence says of the weights is what the ranks said last.
        served = client.weights().served
    paused, fence = client.is_paused(), client.fence()
    if fence.instance != before.instance:
        raise EngineCallFailed("another life of the engine answers")
    return EngineFacts(
        instance=fence.instance,
        epoch=fence.epoch,
        version=fence.version or FIRST_VERSION,
        unfit=fence.unfit,
        paused=paused,
        loading=bool(fence.running),
        lost=fence.lost,
        served=served,
    )


def _verdict(order: Order, answer: WeightsAnswer) -> Answered:
    return Answered(order=order, error="" if answer.ok else answer.error or "no reason given")
