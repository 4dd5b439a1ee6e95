"""The model checker finds nothing wrong, and notices each safeguard that is missing."""

from __future__ import annotations

import pytest

from tests.model.__main__ import PROCESSES, run
from tests.model.mutations import MUTATIONS
from tests.model.setups import every_setup, short_setups


@pytest.mark.timeout(400)
def test_a_few_setups_and_every_missing_safeguard() -> None:
    found = run(short_setups(), MUTATIONS, limit_s=300, processes=PROCESSES)
    assert found.is_good, found


@pytest.mark.full
@pytest.mark.timeout(5400)
def test_every_setup() -> None:
    found = run(every_setup(), (), limit_s=1800, processes=PROCESSES)
    assert found.is_good, found
