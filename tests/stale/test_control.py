"""The check of `test_stale.py` finds stale KV where there is some: on stock engines, updated as people do."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.stale.check import CONTROL_SCHEDULES, play_control, stale_replies

pytestmark = [pytest.mark.stack, pytest.mark.timeout(1800)]


@pytest.mark.parametrize("schedules", [0, pytest.param(CONTROL_SCHEDULES, marks=pytest.mark.full)])
def test_a24_engines_updated_one_by_one_with_their_caches_kept(schedules: int, tmp_path: Path) -> None:
    replies = play_control(tmp_path / "state", range(1, 1 + schedules))
    stale = [each.reply for each in stale_replies(replies, tmp_path)]
    assert replies[0] in stale, "the replica-by-replica scenario"
    assert len(stale) > min(1, schedules)
