"""What the requests of a process share: their rules and what they draw from. `io/start.py` fills it in, `flow.py` reads
it."""

from __future__ import annotations

from dataclasses import dataclass

from router.core.epochs import Salter
from router.core.gate import Gate
from router.core.retry import RetryBudget


@dataclass(frozen=True, kw_only=True)
class FlowRules:
    """The settings that a request obeys."""

    retries: int
    retry_backoff_s: float
    request_timeout_s: float
    """For the whole request: all its legs and attempts."""
    leg_timeout_s: float | None
    """For one leg, up to its first byte."""
    handoff_lifetime_s: float
    """Lease minus margin: an older handoff is never sent."""
    readmit_streams: bool
    """Keep what streams deliver, so that they can go on after an update."""
    session_fields: tuple[str, ...]
    max_samples: int
    """Samples times prompts of one request."""


@dataclass(frozen=True, kw_only=True)
class FlowTools:
    """What all requests of a process share."""

    gate: Gate
    salter: Salter
    budget: RetryBudget
    rules: FlowRules
