"""No reply is computed from stale KV: a few schedules on a running fleet, and all of them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.harness import Headrace
from tests.stale.check import SCHEDULES, examine, play_all, schedules_of
from tests.stale.fleet import JobFleet, job_fleet

pytestmark = [pytest.mark.stack, pytest.mark.timeout(7200)]

FEW = 2


@pytest.fixture(scope="module")
def scratch(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("stale")


@pytest.fixture(scope="module")
def fleet(scratch: Path) -> Iterator[JobFleet]:
    with job_fleet(Headrace(scratch / "state"), scratch) as running:
        yield running


def test_a_few_schedules(fleet: JobFleet, scratch: Path) -> None:
    found = examine(play_all(fleet, schedules_of(range(1, 1 + FEW))), scratch)
    assert found.complaints == []


@pytest.mark.full
def test_all_schedules(fleet: JobFleet, scratch: Path) -> None:
    found = examine(play_all(fleet, schedules_of(range(1 + FEW, 1 + FEW + SCHEDULES))), scratch)
    assert found.complaints == []
