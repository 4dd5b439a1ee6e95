"""Routing policies, one file each; `make_policy` is the one place that looks at their `type`."""

from __future__ import annotations

from typing import assert_never

from router.core.policies.base import NOBODY, Choice, ChoiceContext, Policy
from router.core.policies.consistent_hash import ConsistentHashPolicy
from router.core.policies.least_loaded import LeastLoadedPolicy
from router.core.policies.power_of_two import PowerOfTwoPolicy
from router.core.policies.round_robin import RoundRobinPolicy
from router.core.policies.sticky_least_loaded import StickyLeastLoadedPolicy
from router.settings import (
    ConsistentHash,
    LeastLoaded,
    PolicySettings,
    PowerOfTwo,
    RoundRobin,
    StickyLeastLoaded,
)

__all__ = ["NOBODY", "Choice", "ChoiceContext", "Policy", "make_policy"]


def make_policy(settings: PolicySettings) -> Policy:
    """A fresh policy object, for one role."""
    match settings:
        case StickyLeastLoaded(move=move):
            return StickyLeastLoadedPolicy(move)
        case RoundRobin():
            return RoundRobinPolicy()
        case LeastLoaded():
            return LeastLoadedPolicy()
        case ConsistentHash():
            return ConsistentHashPolicy()
        case PowerOfTwo():
            return PowerOfTwoPolicy()
    assert_never(settings)
