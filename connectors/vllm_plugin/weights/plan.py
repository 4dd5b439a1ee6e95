"""The load plan of one rank: groups of fills, made once of a recording (`recording.py`) and replayed by `load.py`.

Arithmetic only: no torch, no vLLM.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from connectors.vllm_plugin.weights.geometry import Region, box_of, overlap, reordered, row_major
from connectors.vllm_plugin.weights.recording import Copied, Recording
from connectors.weights.source import FetchError
from connectors.weights.tensors import Box, Piece, TensorMeta

BEFORE, AFTER, BUFFERS = "before the layers", "after the layers", "buffers"
"""Names of the groups that are no decoder layer."""
SHOWN = 20
"""Names that the text of an error repeats; `FetchError.tensors` has all."""


@dataclass(frozen=True, slots=True)
class ParameterFacts:
    """A parameter or buffer as the model's loaders know it: before any processing."""

    module: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: str
    is_buffer: bool
    is_loaded: bool
    """False where no checkpoint has it: nothing must fill it."""
    is_processed: bool
    """Whether its module turns what is loaded into something else."""


@dataclass(frozen=True, slots=True)
class Fill:
    """One piece into one parameter."""

    piece: Piece
    parameter: str
    into: Region
    """Of the parameter's storage, with the piece's shape."""
    sent_dtype: str
    is_cast: bool
    """Whether the parameter's dtype is another one."""


@dataclass(frozen=True, slots=True)
class Padding:
    """A part of a parameter that no checkpoint tensor fills."""

    parameter: str
    into: Region
    value: float


@dataclass(frozen=True, slots=True)
class Group:
    """What is loaded together: one decoder layer, or the rest before or after, or buffers."""

    name: str
    fills: tuple[Fill, ...]
    paddings: tuple[Padding, ...]
    processed: tuple[str, ...]
    """Modules that turn what is loaded into something else."""

    @property
    def pieces(self) -> tuple[Piece, ...]:
        return tuple(fill.piece for fill in self.fills)


@dataclass(frozen=True, slots=True)
class LoadPlan:
    """Everything that one rank does at every load of versions with this manifest."""

    groups: tuple[Group, ...]
    pieces: tuple[tuple[Piece, ...], ...]
    """Per group. One object for all loads, by which transports know the plan again."""


def plan_load(
    recording: Recording, manifest: Mapping[str, TensorMeta], parameters: Mapping[str, ParameterFacts]
) -> LoadPlan:
    """Raises FetchError that lists what is refused, missing or filled twice."""
    if recording.refused:
        why = "; ".join(f"{name}: {text}" for name, text in list(recording.refused.items())[:SHOWN])
        raise FetchError(f"tensors that the model does not take: {why}", tuple(recording.refused))
    if recording.computed:
        raise _error(
            "the model's loader computes these from several values, which no plan can replay", recording.computed
        )
    # A rank whose part of the vocabulary is all padding copies nothing of it.
    copies = [each for each in recording.copies if each.into.count]
    constants = [each for each in recording.constants if each.into.count]
    touched = [each.parameter for each in copies] + [each.parameter for each in constants]
    unknown = set(touched) - parameters.keys()
    if unknown:
        raise _error("parameters that cannot be loaded in place", unknown)
    fills = [_fill(copied, manifest[copied.tensor], parameters[copied.parameter]) for copied in copies]
    paddings = [Padding(each.parameter, each.into, each.value) for each in constants]
    _check_covered(fills, paddings, parameters)
    groups = _grouped(fills, paddings, parameters)
    return LoadPlan(groups, tuple(group.pieces for group in groups))


def _fill(copied: Copied, meta: TensorMeta, parameter: ParameterFacts) -> Fill:
    strides = row_major(meta.shape)
    box = box_of(copied.source, meta.shape, strides)
    into = None if box is None else reordered(copied.source, copied.into, box, strides)
    if box is None or into is None:
        raise _error(f"the model's loader takes other parts than boxes of it for {copied.parameter}", [copied.tensor])
    return Fill(Piece(copied.tensor, box), copied.parameter, into, meta.dtype, meta.dtype != parameter.dtype)


def _check_covered(
    fills: Iterable[Fill], paddings: Iterable[Padding], parameters: Mapping[str, ParameterFacts]
) -> None:
    """Every element of every parameter exactly once."""
    boxes: dict[str, list[Box]] = defaultdict(list)
    counts: dict[str, int] = defaultdict(int)
    twice: set[str] = set()
    parts: list[Fill | Padding] = [*fills, *paddings]
    for each in parts:
        facts = parameters[each.parameter]
        box = box_of(each.into, facts.shape, facts.stride)
        if box is None:
            raise _error("the model's loader fills these in parts that are no boxes", [each.parameter])
        boxes[each.parameter].append(box)
        counts[each.parameter] += each.into.count
    for name, found in boxes.items():
        if overlap(found):
            twice.add(name)
    if twice:
        raise _error("parameters that would be filled twice", twice)
    missing = {name for name, facts in parameters.items() if facts.is_loaded and counts[name] < _count(facts)}
    if missing:
        raise _error("parameters that the source does not fill, or not whole", missing)


def _count(facts: ParameterFacts) -> int:
    return Region(facts.shape, facts.stride, 0).count


def _grouped(
    fills: Sequence[Fill], paddings: Sequence[Padding], parameters: Mapping[str, ParameterFacts]
) -> tuple[Group, ...]:
    names = _group_names(parameters)
    members: dict[str, tuple[list[Fill], list[Padding], dict[str, None]]] = {}
    for name in (BEFORE, *dict.fromkeys(names.values()), AFTER, BUFFERS):
        members.setdefault(name, ([], [], {}))
    # Last in the order of the names, wherever they first stood.
    for name in (AFTER, BUFFERS):
        members[name] = members.pop(name)
    for fill in fills:
        members[names[fill.parameter]][0].append(fill)
    for padding in paddings:
        members[names[padding.parameter]][1].append(padding)
    for name in [each.parameter for each in fills] + [each.parameter for each in paddings]:
        if parameters[name].is_processed:
            members[names[name]][2][parameters[name].module] = None
    return tuple(
        Group(name, tuple(found), tuple(padded), tuple(processed))
        for name, (found, padded, processed) in members.items()
        if found or padded
    )


def _group_names(parameters: Mapping[str, ParameterFacts]) -> dict[str, str]:
    """Parameter -> group. A layer is what stands under the outermost number in a name."""
    names: dict[str, str] = {}
    layers_seen = False
    for name, facts in parameters.items():
        layer = _layer_of(name)
        layers_seen = layers_seen or layer is not None
        # A module that processes its tensors needs them all at once, buffers included.
        if facts.is_buffer and not facts.is_processed:
            names[name] = BUFFERS
        else:
            names[name] = layer or (AFTER if layers_seen else BEFORE)
    return names


def _layer_of(name: str) -> str | None:
    parts = name.split(".")
    numbers = [index for index, part in enumerate(parts) if part.isdigit()]
    return ".".join(parts[: numbers[0] + 1]) if numbers else None


def unread(manifest: Mapping[str, TensorMeta], pieces_of_all_ranks: Iterable[Piece]) -> tuple[str, ...]:
    """Tensors of which the ranks of an engine together take a part and leave a part: the model has another shape for
    them.

    A tensor of which no rank takes anything is passed over by the model's own loader, as a tied head is.
    """
    taken: dict[str, set[Box]] = defaultdict(set)
    for piece in pieces_of_all_ranks:
        taken[piece.tensor].add(piece.box)
    return tuple(
        name
        for name, boxes in taken.items()
        if sum(Piece(name, box).count for box in boxes) < Piece(name, manifest[name].whole).count
    )


def _error(message: str, names: Iterable[str]) -> FetchError:
    listed = sorted(names)
    more = f" and {len(listed) - SHOWN} more" if len(listed) > SHOWN else ""
    return FetchError(f"{message}: {', '.join(listed[:SHOWN])}{more}", listed)
