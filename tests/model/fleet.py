"""What is explored: two prefill and two decode engines, two sessions, and one setup of strategy, mode and fault.

Engines are numbers in the model's states and names in the real coordinator and router core. Equal replicas may be
exchanged (`SWAPS`), and states that differ by such an exchange are explored once.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from connectors.types import Role
from orchestrator.spec.weights import InFlightMode, Strategy
from orchestrator.weights.acts import POOL, ROUTER

ENGINES = ("P0", "P1", "D0", "D1")
ROLES: tuple[Role, ...] = ("prefill", "prefill", "decode", "decode")
FLEET: dict[str, Role] = dict(zip(ENGINES, ROLES, strict=True))
NUMBER = {name: number for number, name in enumerate(ENGINES)}
ROUTER_NUMBER, POOL_NUMBER, COORDINATOR_NUMBER = 4, 5, 6
RECEIVERS = (*ENGINES, ROUTER, POOL)

Swap = tuple[int, int, int, int]
"""The new number of each engine. Each undoes itself."""
SAME: Swap = (0, 1, 2, 3)
SWAPS: tuple[Swap, ...] = (SAME, (1, 0, 2, 3), (0, 1, 3, 2), (1, 0, 3, 2))

Fault = Literal["none", "engine", "source", "reborn", "coordinator", "router", "store", "load", "cancel", "client"]
"""What may go wrong, once and at any step. source: an engine dies, and from then on a version that is served can be had
from peers alone. reborn: an engine restarts behind the same port, before anyone notices. load: a rank fails in a load,
which leaves the old weights or torn ones. cancel: the update is cancelled. client: one leaves in the middle of its
request."""
FAULTS: tuple[Fault, ...] = get_args(Fault)


@dataclass(frozen=True, kw_only=True)
class Setup:
    """One exploration."""

    strategy: Strategy
    in_flight: InFlightMode
    fault: Fault
    turns: tuple[int, int] = (2, 2)
    """Of each session."""
    updates: int = 2
    is_fine: bool = False
    """What is on its way between the dispatcher, a worker and an engine is seen there; else it arrives at once."""
    tries: int = 1
    """Of a load, before the fleet goes back."""

    def __str__(self) -> str:
        turns = "+".join(map(str, self.turns))
        return f"{self.strategy} {self.in_flight} {self.fault} {turns} x{self.updates}{' fine' if self.is_fine else ''}"


def instance(engine: int, life: int) -> str:
    return f"{ENGINES[engine]}.{life}"


def life_of(name: str) -> int:
    return int(name.partition(".")[2])


def renamed(text: str, swap: Swap) -> str:
    """An engine's name, or an instance's, after a swap; any other text as it is."""
    number = NUMBER.get(text[:2])
    return text if number is None else ENGINES[swap[number]] + text[2:]
