"""The contract between a load and what brings its bytes: only `fetch` differs between modes and transports.

`vllm_plugin/weights/` walks the groups of its load plan and calls `Fetch.fetch` for each; `path.py`, `store.py` and
`nixl/` implement `Transport`. A publisher on the trainer's side makes what a `SourceInfo` names.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from connectors.weights.tensors import Piece, TensorMeta

if TYPE_CHECKING:
    # Plans are made of these types too, and need no torch.
    import torch

Plan = Callable[[Mapping[str, TensorMeta]], Sequence[Sequence[Piece]]]
"""From the manifest of a version to the pieces that a rank needs, in the order of their fetches: per group those of
`Fetch.fetch`. A piece lies within its tensor as the manifest has it. Raises FetchError with the names of tensors that
are missing, too many or of another shape."""
SourceInfo = Mapping[str, Any]
"""Where one version is to be had, as JSON: `transport` ("path", "store", "nixl"), `version`, and what the transport
needs to find it. Publishers make it, control commands carry it, it holds no secrets."""


class FetchError(Exception):
    """A version could not be brought. `tensors` are the names concerned, as far as they are known."""

    def __init__(self, message: str, tensors: Sequence[str] = ()) -> None:
        super().__init__(message)
        self.tensors = tuple(tensors)


def has_waiting_trainer(source: SourceInfo) -> bool:
    """Whether the version lies in memory that a trainer writes to again once its readers are done."""
    return source.get("transport") == "nixl"


def numbered(source: SourceInfo, *, first_reader: int, readers: int) -> dict[str, Any]:
    """The same source for one engine: its rank 0 is the `first_reader` among the `readers` ranks of all engines. So
    each of them gets its own part of those who hold the same."""
    return {**source, "first_reader": first_reader, "readers": readers}


T = TypeVar("T", str, int)


def source_field(source: SourceInfo, name: str, kind: type[T]) -> T:
    """What a source says of itself. Raises FetchError that names the field."""
    value = source.get(name)
    if not isinstance(value, kind) or isinstance(value, bool):
        needed = f"{name} ({'text' if kind is str else 'a whole number'})"
        raise FetchError(f"the source needs {needed} for transport {source.get('transport')}, and has {value!r}")
    return value


@dataclass(frozen=True, slots=True)
class Target:
    """Where one piece has to be put."""

    piece: Piece
    into: torch.Tensor
    """Has the piece's shape and the dtype that the source sends; any strides, CPU (maybe pinned) or CUDA memory."""
    stays: bool = False
    """This memory stays where it is for all later loads: a transport may keep it registered. Memory that is freed
    between loads must not stay registered: a network card would go on writing to pages that are somebody else's."""


@dataclass(slots=True)
class Moved:
    """What one fetch did."""

    bytes: int = 0
    wait_s: float = 0.0
    """For the source to be ready."""
    transfer_s: float = 0.0
    by_producer: dict[str, int] = field(default_factory=dict)
    """Bytes per producer, where there are several."""


class Fetch(Protocol):
    """One version, open for one rank's load."""

    @property
    def manifest(self) -> Mapping[str, TensorMeta]:
        """All tensors of the version, with the dtypes in which they are sent."""
        ...

    @property
    def stamps(self) -> Mapping[str, str]:
        """File -> what tells it from another one that was there under its name: the same on all ranks that opened the
        same. Empty where a name never comes to stand for something else."""
        ...

    def start(self, group: int, targets: Sequence[Target]) -> None:
        """May begin to fill a group that `fetch` will be asked for, with the same targets: it, or one of those after
        it. Begun again it goes on. What cannot work ahead does nothing. Raises nothing: what goes wrong is told by
        `fetch`."""
        ...

    def fetch(self, group: int, targets: Sequence[Target]) -> Moved:
        """Fill all targets of one group before returning. The pieces are those that `Plan` gave for this group, in
        their order; groups come in ascending order, each once. Raises FetchError; what the targets hold then is
        undefined."""
        ...

    def close(self) -> None:
        """Nothing more is read: the source may forget this reader. Idempotent, never raises."""
        ...


class Transport(Protocol):
    """One rank's way to the weights of all versions; it lives as long as the engine and keeps what later loads can use
    again (connections, registered memory, prepared reads)."""

    def get_ready(self, source: SourceInfo, /) -> None:
        """Do now what the first `open` would have to do, as far as `source` tells: it may name no version. Raises
        FetchError."""
        ...

    def open(self, source: SourceInfo, plan: Plan, *, timeout_s: float) -> Fetch:
        """Open a version: look its manifest up, ask `plan` what of it this rank needs, get ready to fetch that.

        `plan` returns the same object as at the last load as long as the load plan is the same, so that nothing has
        to be planned again. What it raises passes through. `timeout_s` bounds what waits for the source before `plan`,
        what does so after it, and each later fetch. Raises FetchError."""
        ...

    def is_idle(self, wait_s: float, /) -> bool:
        """Whether, within this time, nothing that was given up can write into its targets any more. Before that no
        other load may begin: its weights would be overwritten later."""
        ...

    def close(self) -> None:
        """Free everything, once idle. Idempotent."""
        ...
