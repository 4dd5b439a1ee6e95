"""What a coordinator has to know of a job: whether its engines take new weights, how, and what they start with."""

from __future__ import annotations

from dataclasses import dataclass

from connectors.vllm_plugin.weights.settings import LoadMode
from orchestrator.plan.facts import ClusterFacts
from orchestrator.spec.job import JobSpec
from orchestrator.spec.weights import InFlightMode, Strategy, UpdateLimitsSpec, WeightsSpec

PAUSE_MARGIN_S = 30.0
"""Beyond the handoff lease, for which a prefill engine's pause may have to wait."""


@dataclass(frozen=True, kw_only=True)
class Limits:
    """How long a step may take, and how often it may be tried."""

    prefetch_s: float
    hold_s: float
    """Also for freezing."""
    in_flight_s: float
    drain_s: float
    pause_s: float
    """A prefill engine's pause lasts as long as its oldest unread handoff may live."""
    load_s: float
    command_s: float
    """For steps that are done at once: confirm, publish, resume, open."""
    grace_s: float
    """From the opening of the gate to the purge of older epochs: readers end meanwhile."""
    again_s: float
    """Between two tries of one command."""
    tries: int
    """Loads of one engine in one direction before the fleet turns round."""
    group_pairs: int
    """Pairs of engines that a rolling update moves at a time, once the new epoch has a pair."""


@dataclass(frozen=True, kw_only=True)
class WeightsPlan:
    in_place: bool
    """Engines take new weights while they run; else they keep those that they start with."""
    location: str
    """Of the weights that engines start with: a folder, or a name that their own cache can resolve."""
    load_mode: LoadMode
    strategy: Strategy
    in_flight: InFlightMode
    """Of an update that does not say otherwise."""
    limits: Limits


def plan_weights(spec: JobSpec, facts: ClusterFacts) -> WeightsPlan:
    weights = spec.weights or WeightsSpec()
    return WeightsPlan(
        in_place=spec.weights is not None,
        location=facts.model.location,
        load_mode=weights.load_mode,
        strategy=weights.strategy,
        in_flight=weights.in_flight,
        limits=_limits(weights.limits, spec.handoff.lease),
    )


def _limits(given: UpdateLimitsSpec, handoff_lease_s: float) -> Limits:
    return Limits(
        prefetch_s=given.prefetch,
        hold_s=given.hold,
        in_flight_s=given.in_flight,
        drain_s=given.drain,
        pause_s=given.pause or handoff_lease_s + PAUSE_MARGIN_S,
        load_s=given.load,
        command_s=given.command,
        grace_s=given.grace,
        again_s=given.again,
        tries=given.tries,
        group_pairs=given.group_pairs,
    )
