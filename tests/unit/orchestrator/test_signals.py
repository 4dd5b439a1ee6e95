from __future__ import annotations

import signal
from collections.abc import Iterator

import pytest

from orchestrator import signals
from orchestrator.signals import ASKING, SAME_WISH_S, ignore_interruptions, raise_interruptions


@pytest.fixture(autouse=True)
def handlers() -> Iterator[None]:
    before = {asking: signal.signal(asking, signal.SIG_DFL) for asking in ASKING}
    yield
    for asking, handler in before.items():
        signal.signal(asking, handler)


def test_each_interrupts_and_those_that_follow_at_once_are_the_same_wish(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr(signals.time, "monotonic", lambda: now)
    raise_interruptions()
    for asking in ASKING:
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(asking)
        now += SAME_WISH_S / 2
        for follows in ASKING:
            signal.raise_signal(follows)
        now += SAME_WISH_S / 2


def test_what_is_ignored_stays_ignored() -> None:
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    raise_interruptions()
    signal.raise_signal(signal.SIGHUP)


def test_whoever_ends_is_no_longer_interrupted() -> None:
    raise_interruptions()
    ignore_interruptions()
    for asking in ASKING:
        signal.raise_signal(asking)
