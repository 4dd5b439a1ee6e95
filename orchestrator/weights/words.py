"""The words of a fleet-wide weight update, as frozen data: what is wanted, what is known, and what the journal keeps.

`events.py` and `acts.py` are made of them, `machine.py` moves them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from connectors.types import Role
from connectors.vllm_plugin.weights.settings import LoadMode
from orchestrator.plan.weights import Limits
from orchestrator.spec.weights import InFlightMode, Strategy
from router.core.gate import GateState

Going = Literal["forward", "back", "off", "join"]
"""forward: to the update's version. back: the whole fleet to the committed version, in a new epoch. off: nobody was
touched, so the fleet goes on as it was. join: engines that came up go to the committed version and epoch."""
Phase = Literal[
    "prefetch",
    "hold",
    "in_flight",
    "choose",
    "drain",
    "pause_prefill",
    "freeze",
    "pause_decode",
    "load",
    "commit",
    "confirm",
    "publish",
    "resume",
    "admit",
    "open",
    "purge",
]
Outcome = Literal["committed", "rolled_back", "called_off", "cancelled", "fenced"]
"""cancelled: called off because somebody asked for it. fenced: neither the new nor the old version has a pair of
engines; the gate stays closed until engines join."""
BY_REQUEST = "by request"
"""Why somebody's request was made, or what it cancelled has ended."""


class Order(NamedTuple):
    """Which command is the newer one. Whoever gets a command refuses what is older than the newest it took."""

    update: int
    attempt: int
    step: int


@dataclass(frozen=True, kw_only=True)
class Update:
    """What a trainer asks for."""

    number: int
    version: str
    source: Mapping[str, Any]
    """As connectors/weights/source.py has it. It has to be retained as long as its version is the committed one."""
    strategy: Strategy
    in_flight: InFlightMode
    load_mode: LoadMode
    limits: Limits


@dataclass(frozen=True, kw_only=True)
class EngineFacts:
    """One engine as read back, or as its answers since have it."""

    instance: str
    epoch: int | None
    """Confirmed; None: its fence is closed."""
    version: str
    """Of its weights; those that a life starts with have a name too."""
    unfit: str
    """Why it must not serve whatever comes: torn parameters, or a life that cannot be trusted any more."""
    paused: bool
    """As the engine itself says, not its fence: a pause that was received and has not ended is none yet."""
    loading: bool
    """A command about its weights is running."""
    lost: bool
    """This life cannot be trusted any more; only a restart mends it."""
    served: Mapping[str, Any] | None
    """The source under which peers can read its weights; None where it lets nobody."""


@dataclass(frozen=True, kw_only=True)
class ReplicaFacts:
    """One replica as the router has it."""

    instance: str
    epoch: int | None
    draining: bool


@dataclass(frozen=True, kw_only=True)
class RouterFacts:
    gate: GateState
    replicas: Mapping[str, ReplicaFacts]


@dataclass(frozen=True, kw_only=True)
class Commitment:
    """What the job serves."""

    epoch: int
    version: str
    source: Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class Course:
    """An update under way."""

    update: Update
    going: Going
    phase: Phase
    epoch: int
    """Which the engines are led to."""
    epoch_before: int
    """Which was committed when it began."""
    group: tuple[str, ...]
    """Who moves now in a rolling update, or joins; of no meaning in a barrier, where everyone moves."""
    failures: int
    """Rounds of loads in this direction that have failed."""
    is_written: bool
    """Its loads have begun: recorded before the first of them."""
    why: str
    """Why the fleet turned round; empty while it goes forward."""
    is_cancelled: bool
    """It was called off because somebody asked for that."""


@dataclass(frozen=True, kw_only=True)
class Ended:
    """How the newest update ended."""

    update: int
    outcome: Outcome
    why: str


@dataclass(frozen=True, kw_only=True)
class Position:
    """One record of the journal: all that has to survive. The newest one and the facts read back make the machine."""

    committed: Commitment
    last_update: int
    attempt: int
    """Of `last_update`. Each start of a machine, each retry and each turn is a new one, so its commands are newer."""
    last_epoch: int
    """The highest ever given out."""
    epochs: Mapping[int, str]
    """Epoch -> version, of all that are not purged."""
    course: Course | None
    ended: Ended | None


def first_position(epoch: int, version: str, source: Mapping[str, Any]) -> Position:
    """Of a job whose engines were started with these weights and confirmed for this epoch."""
    return Position(
        committed=Commitment(epoch=epoch, version=version, source=source),
        last_update=0,
        attempt=0,
        last_epoch=epoch,
        epochs={epoch: version},
        course=None,
        ended=None,
    )


Fleet = Mapping[str, Role]
"""Every engine of the job, by name."""
