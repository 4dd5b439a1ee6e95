"""The usable replicas of one role and one epoch, indexed so that the least loaded is found without a scan.

`fleet.py` writes it, the policies read it. The index is a heap whose outdated entries are dropped when
they surface: a change costs O(log n), and so does a choice.
"""

from __future__ import annotations

from heapq import heapify, heappop, heappush, heapreplace

from router.core.table import Member

_Entry = tuple[int, int, int, int, int, Member]
"""(sessions, tokens, chosen, order, version, member): the first three decide, `order` is never equal."""


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
        member.index, member.present = None, False
        member.version += 1
        del self._members[member]
        self._in_order = None

    def touch(self, member: Member) -> None:
        """Something about a member's load or room has changed."""
        heap = self._heap
        member.version += 1
        present = member.has_room
        if present != member.present:
            member.present = present
            self._in_order = None
        if not present:
            return
        if heap and heap[0][5] is member:
            # The one just chosen: its old entry would be the next to be dropped.
            heapreplace(heap, _entry(member))
            return
        heappush(heap, _entry(member))
        if len(heap) > 64 + 4 * len(self._members):
            # Void entries below the top would otherwise pile up for as long as the top stays valid.
            self._heap = [_entry(each) for each in self._members if each.present]
            heapify(self._heap)

    def in_order(self) -> list[Member]:
        """The members with room in the order of their joining; the same list until one comes or goes."""
        if self._in_order is None:
            self._in_order = sorted((each for each in self._members if each.present), key=lambda each: each.order)
        return self._in_order

    def least_loaded(self, avoid: frozenset[str]) -> Member | None:
        """The member with room, outside `avoid`, that comes first; None if there is none."""
        heap = self._heap
        while heap and (heap[0][4] != heap[0][5].version or not heap[0][5].present):
            heappop(heap)
        if not heap:
            return None
        if not avoid or heap[0][5].name not in avoid:
            return heap[0][5]
        return min(
            (each for each in self.in_order() if each.name not in avoid),
            key=lambda each: _entry(each)[:4],
            default=None,
        )


def _entry(member: Member) -> _Entry:
    return (member.sessions, member.tokens, member.chosen, member.order, member.version, member)
