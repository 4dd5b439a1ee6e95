"""The circuit breaker of one replica: from the outcomes of its legs, and now, to whether it may be used.

    closed --failures in a row, or one that says enough--> open --rest over, good probe--> trial --success--> closed
                                                             ^                               |
                                                             +-------- a leg fails ----------+
While on trial one leg at a time goes there. Each opening that no success came between rests twice as long. `table.py`
owns one breaker per replica and asks the probes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

BreakerState = Literal["closed", "open", "trial"]


@dataclass(frozen=True, kw_only=True)
class BreakerRules:
    """When it opens and for how long."""

    failures: int
    """Failed legs in a row that open it."""
    open_s: float
    """The first rest."""
    max_open_s: float


@dataclass(slots=True)
class Breaker:
    """See the module text."""

    rules: BreakerRules
    state: BreakerState = "closed"
    failures: int = 0
    opened: int = 0
    """Openings since the last success."""
    rests_until: float = 0.0

    def leg_succeeded(self) -> None:
        """Close it, unless it is open: then the leg began before, and proves nothing. On trial any leg counts, also one
        that began before."""
        if self.state != "open":
            self.state = "closed"
            self.failures = self.opened = 0

    def leg_failed(self, now: float, *, at_once: bool) -> None:
        """Count a failure; `at_once`: one such is enough."""
        if self.state == "open":
            return
        self.failures += 1
        if at_once or self.state == "trial" or self.failures >= self.rules.failures:
            self.state = "open"
            self.rests_until = now + min(self.rules.open_s * 2.0**self.opened, self.rules.max_open_s)
            self.opened += 1

    def probe_passed(self, now: float) -> None:
        """A good probe after the rest lets one leg try."""
        if self.state == "open" and now >= self.rests_until:
            self.state = "trial"
            self.failures = 0
