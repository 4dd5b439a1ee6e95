"""The engine that modules of this folder share: starting one takes longer than what they do with it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from connectors.engine_client import CommandOrder
from tests.engines.fenced_engine import Engine, planned_engine


@pytest.fixture(scope="session")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    """With its epoch confirmed. `test_fence.py`, the last module that uses it, starts it anew and stops it."""
    engine = planned_engine(tmp_path_factory.mktemp("fenced"))
    try:
        engine.start()
        engine.wait_ready()
        engine.confirm(CommandOrder(update=1, attempt=0, step=0))
        yield engine
    finally:
        engine.stop()
