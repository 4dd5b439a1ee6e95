"""The fault tests share the end-to-end fixtures: a tiny model and a state folder."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.e2e.harness import Headrace
from tests.fakes.tiny_model import make_tiny_model

REPOSITORY = Path(__file__).parents[2]


@pytest.fixture(scope="session")
def tiny_model() -> Path:
    return make_tiny_model(REPOSITORY / ".cache" / "models" / "tiny-qwen3")


@pytest.fixture(scope="session")
def headrace(tmp_path_factory: pytest.TempPathFactory) -> Headrace:
    return Headrace(tmp_path_factory.mktemp("faults"))
