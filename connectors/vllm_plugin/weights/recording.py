"""What the model's own loaders did with a checkpoint, as data: made by `recorder.py`, turned into a load plan by
`plan.py`."""

from __future__ import annotations

from dataclasses import dataclass, field

from connectors.vllm_plugin.weights.geometry import Region


@dataclass(frozen=True, slots=True)
class Copied:
    """A loader copied a part of a checkpoint tensor into a part of a parameter."""

    tensor: str
    source: Region
    parameter: str
    into: Region


@dataclass(frozen=True, slots=True)
class Constant:
    """A loader set a part of a parameter, padding mostly, to one value."""

    parameter: str
    into: Region
    value: float


@dataclass(slots=True)
class Recording:
    """What the loaders did."""

    copies: list[Copied] = field(default_factory=list)
    constants: list[Constant] = field(default_factory=list)
    refused: dict[str, str] = field(default_factory=dict)
    """Checkpoint tensor -> why the model's loader does not take it."""
    computed: set[str] = field(default_factory=set)
    """Parameters that were given something else than a part of a checkpoint tensor: no plan can replay that."""
