"""The load of the replicas of one role, indexed so that the least loaded is found without a scan.

`fleet.py` writes it, the policies read it. The index is a heap whose outdated entries are dropped when
they surface: a change costs O(log n), and so does a choice.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from heapq import heapify, heappop, heappush

_Entry = tuple[int, int, int, int, int]
"""(sessions, tokens, chosen, order, version): the first three decide, `order` names the replica."""


@dataclass(slots=True)
class Load:
    """What one replica carries."""

    name: str
    order: int
    """Position in the settings; unique, and stable when replicas leave and return."""
    sessions: int = 0
    """Sessions pinned here."""
    tokens: int = 0
    """Estimated prompt tokens of the legs in flight."""
    legs: int = 0
    """Legs in flight."""
    chosen: int = 0
    """Number of the choice that last put a session here; 0: never."""
    present: bool = False
    """Only a present replica is ever chosen; an absent one keeps its figures."""
    version: int = 0
    """Grows with every change; heap entries of older versions are void."""


class LoadIndex:
    """Loads by name, and the least of them."""

    def __init__(self, names: Iterable[str]) -> None:
        self._loads = {name: Load(name=name, order=order) for order, name in enumerate(names)}
        self._by_order = list(self._loads.values())
        self._heap: list[_Entry] = []
        self._choices = 0
        self._present = 0

    def __getitem__(self, name: str) -> Load:
        return self._loads[name]

    @property
    def present_count(self) -> int:
        return self._present

    def is_present(self, name: str) -> bool:
        return self._loads[name].present

    def in_order(self) -> list[Load]:
        """All loads, absent replicas too, in the order of the settings."""
        return self._by_order

    def set_present(self, name: str, present: bool) -> None:
        load = self._loads[name]
        if load.present != present:
            load.present = present
            self._present += 1 if present else -1
            self._push(load)

    def change(self, name: str, *, sessions: int = 0, tokens: int = 0, legs: int = 0) -> None:
        """Add to the figures of one replica; none of them may fall below 0."""
        load = self._loads[name]
        load.sessions += sessions
        load.tokens += tokens
        load.legs += legs
        assert load.sessions >= 0, f"sessions of {name} below 0"
        assert load.tokens >= 0, f"tokens of {name} below 0"
        assert load.legs >= 0, f"legs of {name} below 0"
        self._push(load)

    def mark_chosen(self, name: str) -> None:
        self._choices += 1
        load = self._loads[name]
        load.chosen = self._choices
        self._push(load)

    def least_loaded(self, avoid: frozenset[str]) -> str | None:
        """The present replica outside `avoid` that comes first; None if there is none."""
        heap, kept = self._heap, []
        found: str | None = None
        while heap:
            entry = heap[0]
            load = self._by_order[entry[3]]
            if entry[4] != load.version or not load.present:
                heappop(heap)
            elif load.name in avoid:
                kept.append(heappop(heap))
            else:
                found = load.name
                break
        for entry in kept:
            heappush(heap, entry)
        return found

    def _push(self, load: Load) -> None:
        load.version += 1
        if not load.present:
            return
        heappush(self._heap, _entry(load))
        if len(self._heap) > 64 + 4 * len(self._by_order):
            # Void entries below the top would otherwise pile up for as long as the top stays valid.
            self._heap = [_entry(each) for each in self._by_order if each.present]
            heapify(self._heap)


def _entry(load: Load) -> _Entry:
    return (load.sessions, load.tokens, load.chosen, load.order, load.version)
