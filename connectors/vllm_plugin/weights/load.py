"""The one load path: group by group make room, fetch into it, finish it, free it.

`rank.py` opens a version and agrees with the other ranks before and after. What brings the bytes is a `Fetch`: a
transport (`gpu_fetch`) or a copy in host memory (`host_copy.py`, `cpu_prefetch`). Nothing here knows which.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence

import torch

from connectors.vllm_plugin.weights import layers
from connectors.vllm_plugin.weights.numbers import GroupNumbers, LoadNumbers
from connectors.vllm_plugin.weights.pages import Pages
from connectors.vllm_plugin.weights.plan import Group, LoadPlan
from connectors.vllm_plugin.weights.rooms import Room, Rooms
from connectors.weights.source import Fetch, FetchError, Target

GROUPS_AHEAD = 8
"""In flight behind the one that is waited for: what a load does for a group takes as long as a GPU reads one."""


class Load:
    """One load of one version into one rank's model."""

    def __init__(
        self, plan: LoadPlan, rooms: Rooms, fetch: Fetch, *, check_finite: bool, attention_dtype: torch.dtype
    ) -> None:
        self.numbers = LoadNumbers()
        self.wrote = False
        """Whether parameters that the engine computes with may differ from before."""
        self._plan = plan
        self._rooms = rooms
        self._pages = Pages()
        self._fetch = fetch
        self._check_finite = check_finite
        self._attention_dtype = attention_dtype
        self._ahead: deque[Room] = deque()
        """Of the groups that come next and were started already."""

    def run(self, go_on: Callable[[], None]) -> None:
        """Fill every parameter. `go_on` is asked before each group and raises FetchError where the load must end.

        Raises FetchError, or what vLLM's processing raises. `wrote` says then whether the old weights are whole.
        """
        with torch.no_grad():
            for index in range(len(self._plan.groups)):
                go_on()
                self._load_group(index)
            self._rooms.finish(self._attention_dtype)

    def _load_group(self, index: int) -> None:
        group = self._plan.groups[index]
        started = time.perf_counter()
        room = self._ahead.popleft() if self._ahead else self._rooms.room(index, self._pages)
        opened_s = time.perf_counter() - started
        try:
            self._start(index, room)
            self._start_ahead(index + 1)
            moved = self._fetch.fetch(index, room.targets)
            if self._check_finite:
                refuse_non_finite(room.targets)
        except BaseException:
            room.put_back()
            raise
        copy_s, process_s = self._finish(group, room)
        for producer, count in moved.by_producer.items():
            self.numbers.by_producer[producer] = self.numbers.by_producer.get(producer, 0) + count
        seconds = time.perf_counter() - started
        self.numbers.groups.append(
            GroupNumbers(group.name, moved.bytes, seconds, moved.wait_s, moved.transfer_s, copy_s, opened_s + process_s)
        )

    def _start_ahead(self, index: int) -> None:
        """Where groups need no memory of their own, their bytes may follow at once those of the groups before."""
        while len(self._ahead) < GROUPS_AHEAD:
            later = index + len(self._ahead)
            if later == len(self._plan.groups) or not self._rooms.needs_no_memory(later):
                return
            room = self._rooms.room(later, self._pages)
            self._start(later, room)
            self._ahead.append(room)

    def _start(self, index: int, room: Room) -> None:
        self.wrote = self.wrote or room.writes_at_once
        self._fetch.start(index, room.targets)

    def _finish(self, group: Group, room: Room) -> tuple[float, float]:
        """Seconds of copying and of processing."""
        staged = room.staged()
        self.wrote = self.wrote or bool(staged or room.opened or group.paddings)
        started = time.perf_counter()
        for padding in group.paddings:
            self._rooms.part(padding.parameter, padding.into).fill_(padding.value)
        for staging, parameter in staged:
            parameter.copy_(staging)
        copied = time.perf_counter()
        try:
            while room.opened:
                layers.close_module(room.opened[-1])
                room.opened.pop()
        except BaseException:
            # Torn, but the next load must find the tensors whose addresses the engine knows.
            room.put_back()
            raise
        return copied - started, time.perf_counter() - copied


def refuse_non_finite(targets: Sequence[Target]) -> None:
    """Raises FetchError that lists the tensors with a value that is infinite or no number."""
    names = {
        target.piece.tensor
        for target in targets
        if target.into.is_floating_point() and not bool(torch.isfinite(target.into.float()).all())
    }
    if names:
        listed = sorted(names)
        raise FetchError(f"values that are infinite or no numbers in {', '.join(listed[:20])}", listed)
