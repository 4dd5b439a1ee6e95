"""With decode's saving switched off, only the prompt comes back from the pool."""

from __future__ import annotations

from typing import Any

import pytest

from tests.e2e.conversations import (
    WITH_DECODE_SAVES,
    WITHOUT_DECODE_SAVES,
    Measured,
    Turns,
    assert_same,
    measure,
)

pytestmark = [pytest.mark.stack, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def measured(pair: dict[str, Any]) -> Measured:
    return measure(pair, WITHOUT_DECODE_SAVES)


def test_lengths_tell_the_two_sums_apart() -> None:
    assert WITH_DECODE_SAVES > WITHOUT_DECODE_SAVES > 0


def test_only_the_prompt_comes_back(measured: Measured) -> None:
    assert measured.external_hits == WITHOUT_DECODE_SAVES


def test_outputs_equal_a_colocated_engine(reference: Turns, measured: Measured) -> None:
    assert_same(measured.turns, reference)
