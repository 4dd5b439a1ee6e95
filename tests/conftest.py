"""What holds for all tests."""

from __future__ import annotations

import signal

from hypothesis import settings

# A test says whether something is right, not how fast this machine is today.
settings.register_profile("untimed", deadline=None)
settings.load_profile("untimed")

# A shell's background jobs ignore it, and so would every process that a test starts and interrupts.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
