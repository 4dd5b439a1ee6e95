"""No reply is computed from stale KV: a few schedules of `tests/stale`, and all of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.fleet.control import Control
from tests.stale.check import SCHEDULES, examine, play_all, schedules_of
from tests.stale.fleet import JobFleet

pytestmark = [pytest.mark.stack, pytest.mark.timeout(7200)]

FEW = range(5, 7)
"""A barrier and rolling updates, a source that does not fit, a slow engine, a slow store. None kills an engine, which
takes longest; `test_updates.py` does."""
ALL = range(1, 1 + SCHEDULES)


@pytest.mark.parametrize("seeds", [FEW, pytest.param(ALL, marks=pytest.mark.full)], ids=len)
def test_schedules(job: dict[str, Any], control: Control, tmp_path: Path, seeds: range) -> None:
    # In an epoch of its own: what earlier schedules have left in this one would look as if it came from another.
    control.update()
    found = examine(play_all(JobFleet(control, job, tmp_path), schedules_of(seeds)), tmp_path)
    assert found.complaints == []
