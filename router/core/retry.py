"""How often and how soon a failed request is run again. One budget per router process, asked by every `flow.py`."""

from __future__ import annotations

from dataclasses import dataclass

_JITTER_STEPS = 16


@dataclass(slots=True)
class RetryBudget:
    """Retries that may still be made. Each request served adds a part of one, so that a fleet in which everything fails
    is soon asked everything only once."""

    per_request: float
    most: float
    left: float

    @classmethod
    def full(cls, *, per_request: float, most: int) -> RetryBudget:
        return cls(per_request=per_request, most=float(most), left=float(most))

    def request_served(self) -> None:
        if self.left < self.most:
            self.left = min(self.most, self.left + self.per_request)

    def take(self) -> bool:
        """Spend one retry, if there is one."""
        if self.left < 1:
            return False
        self.left -= 1
        return True


def backoff_s(first_s: float, retries_before: int, number: int) -> float:
    """Pause before a retry: doubled each time, and up to half of it taken off so that requests that failed together
    don't come back together. The request's number stands in for chance."""
    whole = first_s * 2.0**retries_before
    return whole * (1 - 0.5 * (number % _JITTER_STEPS) / _JITTER_STEPS)
