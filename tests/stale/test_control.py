"""The check of `test_stale.py` finds stale KV where there is some: on stock engines, updated as people do."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.stale.check import CONTROL_SCHEDULES, play_control, stale_replies

pytestmark = [pytest.mark.stack, pytest.mark.full, pytest.mark.timeout(1800)]


def test_a24_engines_updated_one_by_one_with_their_caches_kept(tmp_path: Path) -> None:
    replies = play_control(tmp_path / "state", range(1, 1 + CONTROL_SCHEDULES))
    stale = stale_replies(replies, tmp_path)
    assert replies[0] in [each.reply for each in stale], "the replica-by-replica scenario"
    assert len(stale) > 1
