"""Fixtures of the end-to-end tests: one state folder per session, jobs shared by the tests that only look at them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.harness import Headrace, split_job
from tests.fakes.tiny_model import make_tiny_model

REPOSITORY = Path(__file__).parents[2]
SPLIT_PORT = 9431


@pytest.fixture(scope="session")
def tiny_model() -> Path:
    return make_tiny_model(REPOSITORY / ".cache" / "models" / "tiny-qwen3")


@pytest.fixture(scope="session")
def headrace(tmp_path_factory: pytest.TempPathFactory) -> Headrace:
    return Headrace(tmp_path_factory.mktemp("headrace home"))


@pytest.fixture(scope="module")
def split(headrace: Headrace, tiny_model: Path) -> Iterator[dict[str, Any]]:
    """The main job, up: 1 prefill lending 64 MiB, 1 decode at zero capacity."""
    try:
        yield headrace.up(split_job("e2e-split", tiny_model, SPLIT_PORT))
    finally:
        headrace.down("e2e-split")
