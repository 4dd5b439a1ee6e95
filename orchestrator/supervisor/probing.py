"""Probes the processes of a job side by side: all of them take as long as the slowest.

`loop.py`, `watch.py` and `view.py` look at units by it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

from deploy.probe import ProbeResult
from deploy.unit import LaunchUnit, UnitStatus
from orchestrator.supervisor.interfaces import ReadinessProbe

PROBES_AT_ONCE = 16


def probe_units(
    units: Sequence[LaunchUnit], statuses: Mapping[str, UnitStatus], probe: ReadinessProbe
) -> dict[str, ProbeResult]:
    """Of units that live, by name."""
    with ThreadPoolExecutor(PROBES_AT_ONCE) as pool:
        results = pool.map(lambda unit: probe(unit.probe, statuses[unit.name].members), units)
        return dict(zip((unit.name for unit in units), results, strict=True))
