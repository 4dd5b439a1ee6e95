"""With decode's saving switched off, only the prompt comes back from the pool; and the CLI stops the job cleanly."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.conversations import (
    WITH_DECODE_SAVES,
    WITHOUT_DECODE_SAVES,
    Measured,
    Turns,
    assert_same,
    measure,
)
from tests.e2e.harness import Headrace, split_job

pytestmark = [pytest.mark.stack, pytest.mark.timeout(900)]

NAME = "not-saving"


@pytest.fixture(scope="module")
def measured(headrace: Headrace, tiny_model: Path) -> Iterator[Measured]:
    roles = {
        "prefill": {},
        "decode": {"kv_offload": {"cpu": {"num_bytes": 0}, "save_decode_cache": False}},
    }
    table = split_job(NAME, tiny_model, 9432, roles=roles, monitoring={"enabled": False})
    try:
        yield measure(headrace.up(table), WITHOUT_DECODE_SAVES)
    finally:
        headrace.down(NAME)
        assert headrace.status(NAME)["phase"] == "stopped"


def test_lengths_tell_the_two_sums_apart() -> None:
    assert WITH_DECODE_SAVES > WITHOUT_DECODE_SAVES > 0


def test_only_the_prompt_comes_back(measured: Measured) -> None:
    assert measured.external_hits == WITHOUT_DECODE_SAVES


def test_outputs_equal_a_colocated_engine(reference: Turns, measured: Measured) -> None:
    assert_same(measured.turns, reference)
