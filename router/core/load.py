"""The usable replicas of one role and one epoch, indexed so that the least loaded is found without a scan.

`fleet.py` writes it, the policies read it. The index is a heap of what each member's load was at some moment and is now
at least: a member whose load grows keeps its entry and is put right when that surfaces, one whose load falls below its
entry gets a new one. So a leg of a pinned session, which comes and goes, costs the heap nothing, and a choice O(log n).
"""

from __future__ import annotations

from heapq import heapify, heappop, heappush, heapreplace

from router.core.table import Member

_Entry = tuple[int, int, int, int, Member]
"""(sessions, tokens, chosen, order, member): the first three decide, `order` is never equal."""


class LoadIndex:
    """Usable members, and the least loaded of those with room."""

    __slots__ = ("_heap", "_in_order", "_members", "epoch")

    def __init__(self, epoch: int) -> None:
        self.epoch = epoch
        self._members: dict[Member, None] = {}
        self._heap: list[_Entry] = []
        self._in_order: list[Member] | None = None

    def __len__(self) -> int:
        """How many are usable, with room or without."""
        return len(self._members)

    def add(self, member: Member) -> None:
        assert member.index is None, f"{member.name} is indexed elsewhere"
        member.index = self
        self._members[member] = None
        self.touch(member)

    def discard(self, member: Member) -> None:
        assert member.index is self, f"{member.name} is not indexed here"
        member.index, member.present, member.entry = None, False, None
        del self._members[member]
        self._in_order = None

    def touch(self, member: Member) -> None:
        """Something about a member's load or room has changed."""
        present = member.has_room
        if present != member.present:
            member.present = present
            self._in_order = None
        if not present:
            member.entry = None
            return
        known = member.entry
        if known is None or (member.sessions, member.tokens, member.chosen) < known[:3]:
            member.entry = entry = _entry(member)
            heappush(self._heap, entry)
            if len(self._heap) > 64 + 4 * len(self._members):
                # Void entries below the top would otherwise pile up for as long as the top stays valid.
                self._heap = [each.entry for each in self._members if each.entry is not None]
                heapify(self._heap)

    def in_order(self) -> list[Member]:
        """The members with room in the order of their joining; the same list until one comes or goes."""
        if self._in_order is None:
            self._in_order = sorted((each for each in self._members if each.present), key=lambda each: each.order)
        return self._in_order

    def least_loaded(self, avoid: frozenset[str]) -> Member | None:
        """The member with room, outside `avoid`, that comes first; None if there is none."""
        top = self._top()
        if top is None or not avoid or top.name not in avoid:
            return top
        return min(
            (each for each in self.in_order() if each.name not in avoid),
            key=lambda each: _entry(each)[:4],
            default=None,
        )

    def _top(self) -> Member | None:
        heap = self._heap
        while heap:
            entry = heap[0]
            member = entry[4]
            if member.entry is not entry:
                heappop(heap)
            elif (member.sessions, member.tokens, member.chosen) == entry[:3]:
                return member
            else:
                member.entry = now = _entry(member)
                heapreplace(heap, now)
        return None


def _entry(member: Member) -> _Entry:
    return (member.sessions, member.tokens, member.chosen, member.order, member)
