"""A fleet of the usual shape, without any IO."""

from __future__ import annotations

from typing import Any

import pytest

from router.core.fleet import Fleet
from router.settings import EngineRole, RouterSettings


def make_settings(*, prefill: int = 0, decode: int = 0, colocated: int = 0, **changes: Any) -> RouterSettings:
    counts: dict[EngineRole, int] = {"prefill": prefill, "decode": decode, "colocated": colocated}
    engines = [
        {"name": f"{role}-{number}", "role": role, "url": f"http://{role}-{number}/"}
        for role, count in counts.items()
        for number in range(count)
    ]
    values: dict[str, Any] = {
        "job": "test",
        "host": "127.0.0.1",
        "port": 0,
        "internal_host": "127.0.0.1",
        "internal_port": 0,
        "engines": engines,
        "handoff_lease_s": 30.0,
    }
    return RouterSettings.model_validate(values | changes)


class FleetMaker:
    """Makes fleets whose replicas are usable."""

    settings = staticmethod(make_settings)

    def __call__(self, **arguments: Any) -> Fleet:
        fleet = Fleet(make_settings(**arguments))
        for replica in fleet.table.replicas:
            fleet.probe_passed(replica.name)
        return fleet


@pytest.fixture
def make_fleet() -> FleetMaker:
    return FleetMaker()
