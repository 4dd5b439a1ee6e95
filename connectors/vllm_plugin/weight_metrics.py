"""What loads took, in the engine's own `/metrics`.

`weight_routes.py` reports loads here. `prometheus_client` comes with vLLM's API server.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

from prometheus_client import Counter, Gauge

from connectors.vllm_plugin.weights.verdict import RankReport

PARTS = {
    "open_s": "open",
    "plan_s": "plan",
    "prefetch_wait_s": "prefetch_wait",
    "wait_s": "source_wait",
    "transfer_s": "transfer",
    "copy_s": "copy",
    "process_s": "process",
    "agree_s": "agree",
    "seconds": "total",
}
"""Figure of a load -> label."""


class WeightMetrics:
    """Of one engine."""

    def __init__(self) -> None:
        self._loads = Counter("headrace_weights_loads", "Loads of weights by how they ended.", ["outcome"])
        self._seconds = Gauge("headrace_weights_load_seconds", "Parts of the last load.", ["rank", "part"])
        self._bytes = Gauge("headrace_weights_load_bytes", "Brought by the last load.", ["rank"])
        self._peak = Gauge(
            "headrace_weights_load_peak_extra_bytes", "Host memory of the last load at its peak.", ["rank"]
        )
        self._unfit = Gauge("headrace_weights_unfit", "1 while the engine must not serve for its weights' sake.")

    def loaded(self, reports: Sequence[RankReport], *, ok: bool, unfit: bool) -> None:
        """A load has ended."""
        self._loads.labels("success" if ok else "failure").inc()
        self._unfit.set(unfit)
        for report in reports:
            if not ok or report.last_load is None:
                continue
            numbers = report.last_load.numbers
            for figure, part in PARTS.items():
                self._seconds.labels(report.rank, part).set(numbers[figure])
            self._bytes.labels(report.rank).set(numbers["bytes"])
            if numbers["peak_extra_bytes"] is not None:
                self._peak.labels(report.rank).set(numbers["peak_extra_bytes"])


@cache
def weight_metrics() -> WeightMetrics:
    """Of this process, as the registry that they are in."""
    return WeightMetrics()
