"""Every TCP port of every process, decided before anything starts (field case A29).

A job gets a block of ports of its own, by its name and its owner's folders, below the kernel's ephemeral range:
outgoing connections of other programs never take them, and Mooncake ignores ranges that reach into it. Blocks that
another recorded job has planned are passed over. Ports only have to differ on one node, so each node counts through
the block on its own. A job that is planned anew while it runs keeps what it has, by what it is for.
"""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Mapping

from connectors.mooncake import EPHEMERAL_PORTS_FROM

FIRST_PORT = 10240
BLOCK_PORTS = 512
PORTS_SETTING = "ports.base"
"""The job file's field that moves everything handed out here."""


class PortsExhausted(Exception):
    """The block is too small for this node's processes, or no block is free."""


PortBlocks = Mapping[str, tuple[int, int]]
"""(first, count) of neighbouring ports, by what they are for, e.g. "prefill-0 http"."""


class PortMap:
    """Hands out ports node by node, in the order asked."""

    def __init__(
        self,
        *,
        owner: str,
        user_base: int | None,
        reserved: frozenset[int],
        taken: frozenset[int],
        standing: PortBlocks,
    ) -> None:
        """`owner`: what sets this job apart from every other of the node, those of other users and state folders
        included, about whose ports nothing is known. `taken`: ports that the user fixed, which are passed over.
        `standing`: what the job has already."""
        self._standing = standing
        own = ports_of(standing)
        if own:
            self.base = min(own)
        else:
            self.base = user_base if user_base is not None else _block_base(owner, reserved)
        self._avoid = reserved | taken | own
        self._next: dict[str, int] = defaultdict(lambda: self.base)
        self._given: dict[str, tuple[int, int]] = {}

    @property
    def given(self) -> PortBlocks:
        """All that was handed out so far."""
        return dict(self._given)

    def one(self, node: str, purpose: str) -> int:
        return self.block(node, purpose, 1)[0]

    def block(self, node: str, purpose: str, count: int) -> tuple[int, int]:
        """(first, count) of neighbouring ports.

        Raises:
            PortsExhausted: the port space ends below the ephemeral range.
        """
        if purpose not in self._given:
            standing = self._standing.get(purpose)
            self._given[purpose] = standing if standing is not None else self._fresh(node, count)
        return self._given[purpose]

    def _fresh(self, node: str, count: int) -> tuple[int, int]:
        first = self._next[node]
        while clashes := [port for port in self._avoid if first <= port < first + count]:
            first = max(clashes) + 1
        if first + count > EPHEMERAL_PORTS_FROM:
            raise PortsExhausted(f"no {count} ports left between {self.base} and {EPHEMERAL_PORTS_FROM} on {node}")
        self._next[node] = first + count
        return first, count


def ports_of(blocks: PortBlocks) -> frozenset[int]:
    """Every port of them."""
    return frozenset(port for first, count in blocks.values() for port in range(first, first + count))


def _block_base(owner: str, reserved: frozenset[int]) -> int:
    blocks = (EPHEMERAL_PORTS_FROM - FIRST_PORT) // BLOCK_PORTS
    start = int.from_bytes(hashlib.sha256(owner.encode()).digest()[:4], "big") % blocks
    for step in range(blocks):
        base = FIRST_PORT + (start + step) % blocks * BLOCK_PORTS
        if not reserved & set(range(base, base + BLOCK_PORTS)):
            return base
    raise PortsExhausted("every block of ports is planned by another job; stop one, or set ports.base")
