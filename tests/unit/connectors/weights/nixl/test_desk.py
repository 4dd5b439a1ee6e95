"""What readers hear of the leader, and when the trainer goes on."""

from __future__ import annotations

import threading

from connectors.weights.nixl.desk import Desk
from connectors.weights.nixl.leases import Readers
from connectors.weights.nixl.messages import (
    AwaitClosed,
    Confirm,
    Granted,
    Layout,
    Open,
    Opened,
    Refused,
    Release,
    Renew,
)

LAYOUT = Layout("layout", {}, ())
LONG_S = 60.0


def serving() -> Desk:
    desk = Desk(lease_s=LONG_S)
    desk.open("v1", LAYOUT)
    return desk


def let_in(desk: Desk, known_layout: str = "") -> Opened:
    answer = desk.answer(Open("reader", "v1", known_layout))
    assert isinstance(answer, Opened)
    return answer


def test_the_layout_is_sent_to_whom_it_is_news() -> None:
    desk = serving()
    assert let_in(desk).layout == LAYOUT
    assert let_in(desk, "layout").layout is None
    assert let_in(desk, "another").layout == LAYOUT


def test_after_the_time_allowed_the_version_is_closed_and_its_readers_are_told() -> None:
    desk = serving()
    opened = let_in(desk)
    assert desk.finish("v1", readers=1, timeout_s=0) == Readers(frozenset(), frozenset({"reader"}))
    for question in (Renew(opened.lease), Confirm(opened.lease), Open("reader", "v1", "")):
        assert isinstance(desk.answer(question), Refused)
    assert desk.finish("v1", readers=1, timeout_s=LONG_S) is None


def test_one_waits_for_the_reader_in_the_middle_whoever_else_is_released() -> None:
    desk = serving()
    opened = let_in(desk)
    desk.answer(Release("v1"))
    ended: list[Readers | None] = []
    trainer = threading.Thread(target=lambda: ended.append(desk.finish("v1", readers=None, timeout_s=LONG_S)))
    trainer.start()
    assert isinstance(desk.answer(AwaitClosed("v1", 0)), Refused)
    assert desk.answer(Confirm(opened.lease)) == Granted()
    trainer.join()
    assert ended == [Readers(frozenset({"reader"}), frozenset())]
    assert desk.answer(AwaitClosed("v1", LONG_S)) == Granted()


def test_a_release_of_another_version_is_not_heard() -> None:
    desk = serving()
    desk.answer(Release("v0"))
    assert desk.finish("v1", readers=None, timeout_s=0) == Readers(frozenset(), frozenset())
    desk.open("v2", LAYOUT)
    desk.answer(Release("v2"))
    assert desk.finish("v2", readers=None, timeout_s=LONG_S) == Readers(frozenset(), frozenset())
