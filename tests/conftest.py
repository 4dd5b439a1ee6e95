"""What holds for all tests."""

from __future__ import annotations

from hypothesis import settings

# A test says whether something is right, not how fast this machine is today.
settings.register_profile("untimed", deadline=None)
settings.load_profile("untimed")
