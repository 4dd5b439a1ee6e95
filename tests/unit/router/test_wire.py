"""The link between a router's processes: what is sent in a turn arrives in order, however the bytes are cut."""

from __future__ import annotations

import asyncio
import itertools
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.core.asks import Ask, Grant, LegEnd, Refusal
from router.io import wire
from tests.unit.router.http1.traffic import FakeTransport

ASK = Ask(request=1, place=1, serial=1, session="s", session_lasts=True, tokens=5, avoid=frozenset({"d-0"}))
END = LegEnd(ticket=3, outcome="ok", blamed=False, seconds=0.5, cached_tokens=2**53, handoff_from="p-0")
MESSAGES: list[Any] = [ASK, END, wire.Left(1), wire.ByteSeen("d-0"), wire.FinishSession("ü")]
GRANT = Grant(
    ticket=3, serial=1, role="decode", replica="d-0", url="http://h", instance="i", epoch=2, version="v", reason="new"
)


def sent(messages: list[list[Any]]) -> bytes:
    """The bytes of these turns."""

    async def case() -> bytes:
        link, transport = wire.Link(wire.ToWorker, lambda _message: None, lambda: None), FakeTransport()
        link.connection_made(transport)
        for turn in messages:
            for message in turn:
                link.send(message)
            await asyncio.sleep(0)
        return transport.written

    return asyncio.run(case())


def taken(kinds: Any, pieces: list[bytes]) -> list[Any]:
    async def case() -> list[Any]:
        found = list[Any]()
        link = wire.Link(kinds, found.append, lambda: None)
        for piece in pieces:
            link.data_received(piece)
        return found

    return asyncio.run(case())


@given(cuts=st.lists(st.integers(0, 400), max_size=6), turns=st.lists(st.lists(st.sampled_from(MESSAGES)), max_size=4))
def test_messages_arrive_in_order_however_they_are_cut(cuts: list[int], turns: list[list[Any]]) -> None:
    raw = sent(turns)
    ends = [0, *sorted(min(each, len(raw)) for each in cuts), len(raw)]
    pieces = [raw[start:end] for start, end in itertools.pairwise(ends)]
    assert taken(wire.FromWorker, pieces) == [message for turn in turns for message in turn]


@pytest.mark.parametrize("answer", [GRANT, Refusal(serial=1, kind="no_pair", message="gone")])
def test_a_decision_arrives_as_it_was_made(answer: Grant | Refusal) -> None:
    assert taken(wire.ToWorker, [sent([[wire.Decided(7, answer)]])]) == [wire.Decided(7, answer)]


def test_what_cannot_be_sent_is_told_to_its_sender_and_costs_nobody_else_anything() -> None:
    async def case() -> bytes:
        link, transport = wire.Link(wire.ToWorker, lambda _message: None, lambda: None), FakeTransport()
        link.connection_made(transport)
        link.send(ASK)
        with pytest.raises(OverflowError):
            link.send(LegEnd(ticket=1, outcome="ok", cached_tokens=2**64))
        link.send(END)
        link.close()
        return transport.written

    assert taken(wire.FromWorker, [asyncio.run(case())]) == [ASK, END]
