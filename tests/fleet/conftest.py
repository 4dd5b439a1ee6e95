"""One job of two pairs for all modules of this folder: starting its engines takes longer than most of what is tested
with them. A test that stops or kills something of it is not over before it is whole again."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.e2e.harness import Headrace
from tests.fleet.control import Control, control_plane
from tests.fleet.job import NAME, fleet_table, wait_whole


@pytest.fixture(scope="session")
def headrace(tmp_path_factory: pytest.TempPathFactory) -> Headrace:
    return Headrace(tmp_path_factory.mktemp("fleet"))


@pytest.fixture(scope="session")
def control(headrace: Headrace) -> Iterator[Control]:
    with control_plane(headrace, NAME) as control:
        yield control


@pytest.fixture(scope="session")
def job(control: Control) -> Iterator[dict[str, Any]]:
    """Its status once it serves."""
    with control.running_job(fleet_table()) as status:
        yield status


@pytest.fixture(autouse=True)
def _whole(job: dict[str, Any], control: Control) -> Iterator[None]:
    yield
    wait_whole(job, control)
