"""Routing policies, one file each; `make_policy` is the one place that looks at their `type`."""

from __future__ import annotations

from router.core.policies.base import ChoiceContext, Policy
from router.core.policies.round_robin import RoundRobinPolicy
from router.core.policies.sticky_least_loaded import StickyLeastLoadedPolicy
from router.settings import PolicySettings, StickyLeastLoaded

__all__ = ["ChoiceContext", "Policy", "make_policy"]


def make_policy(settings: PolicySettings) -> Policy:
    """A fresh policy object, for one role."""
    if isinstance(settings, StickyLeastLoaded):
        return StickyLeastLoadedPolicy()
    return RoundRobinPolicy()
