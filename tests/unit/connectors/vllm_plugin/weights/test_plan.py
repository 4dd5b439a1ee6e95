"""Recordings into load plans: groups and their order, and every way in which a source and a model do not fit."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from connectors.vllm_plugin.weights.geometry import Region, row_major
from connectors.vllm_plugin.weights.plan import AFTER, BEFORE, BUFFERS, LoadPlan, ParameterFacts, plan_load, unread
from connectors.vllm_plugin.weights.recording import Constant, Copied, Recording
from connectors.weights.source import FetchError
from connectors.weights.tensors import Piece, TensorMeta


def facts(name: str, shape: tuple[int, ...], **more: Any) -> ParameterFacts:
    given = {"dtype": "float32", "is_buffer": False, "is_loaded": True, "is_processed": False, **more}
    return ParameterFacts(module=name.rpartition(".")[0], shape=shape, stride=row_major(shape), **given)


def whole(shape: tuple[int, ...], offset: int = 0, stride: tuple[int, ...] | None = None) -> Region:
    return Region(shape, stride or row_major(shape), offset)


def copied(tensor: str, parameter: str, shape: tuple[int, ...], at: int = 0) -> Copied:
    return Copied(tensor, whole(shape), parameter, whole(shape, at))


PARAMETERS = {
    "embed.weight": facts("embed.weight", (4, 2)),
    "layers.0.qkv.weight": facts("layers.0.qkv.weight", (6, 2), is_processed=True),
    "layers.0.norm.weight": facts("layers.0.norm.weight", (2,)),
    "layers.1.qkv.weight": facts("layers.1.qkv.weight", (6, 2), is_processed=True),
    "layers.1.norm.weight": facts("layers.1.norm.weight", (2,)),
    "layers.1.norm.mean": facts("layers.1.norm.mean", (2,), is_buffer=True, is_loaded=False),
    "norm.weight": facts("norm.weight", (2,)),
}
MANIFEST = {
    "e": TensorMeta("float32", (4, 2)),
    **{f"{layer}.{part}": TensorMeta("bfloat16", (2, 2)) for layer in (0, 1) for part in "qkv"},
    **{f"{name}norm": TensorMeta("float32", (2,)) for name in ("0.", "1.", "")},
    "mean": TensorMeta("float32", (2,)),
}


def recording() -> Recording:
    """In the order of an unordered checkpoint."""
    copies = [copied("mean", "layers.1.norm.mean", (2,)), copied("norm", "norm.weight", (2,))]
    for layer in (1, 0):
        for index, part in enumerate("qkv"):
            copies.append(copied(f"{layer}.{part}", f"layers.{layer}.qkv.weight", (2, 2), 4 * index))
        copies.append(copied(f"{layer}.norm", f"layers.{layer}.norm.weight", (2,)))
    copies.append(copied("e", "embed.weight", (4, 2)))
    return Recording(copies=copies)


def plan(
    recorded: Recording,
    manifest: Mapping[str, TensorMeta] = MANIFEST,
    parameters: Mapping[str, ParameterFacts] = PARAMETERS,
) -> LoadPlan:
    return plan_load(recorded, manifest, parameters)


def test_groups_follow_the_model_and_buffers_come_last() -> None:
    groups = plan(recording()).groups
    assert [group.name for group in groups] == [BEFORE, "layers.0", "layers.1", AFTER, BUFFERS]
    assert [group.processed for group in groups] == [(), ("layers.0.qkv",), ("layers.1.qkv",), (), ()]
    assert plan(recording()).pieces == tuple(group.pieces for group in groups)


def test_a_fused_parameter_is_filled_from_its_parts_and_cast() -> None:
    layer = plan(recording()).groups[1]
    fills = {fill.piece.tensor: fill for fill in layer.fills}
    assert [fills[f"0.{part}"].into.offset for part in "qkv"] == [0, 4, 8]
    assert {name: fill.is_cast for name, fill in fills.items()} == {
        "0.q": True,
        "0.k": True,
        "0.v": True,
        "0.norm": False,
    }


def test_a_transposed_part_lands_transposed() -> None:
    transposed = Copied("t", Region((3, 2), (1, 3), 0), "p.weight", whole((3, 2)))
    made = plan(
        Recording(copies=[transposed]), {"t": TensorMeta("float32", (2, 3))}, {"p.weight": facts("p.weight", (3, 2))}
    )
    (fill,) = made.groups[0].fills
    assert fill.piece == Piece("t", ((0, 2), (0, 3)))
    assert (fill.into.shape, fill.into.stride) == ((2, 3), (1, 2))


def test_padding_counts_as_filled() -> None:
    recorded = recording()
    recorded.copies = [each for each in recorded.copies if each.tensor != "e"]
    recorded.copies.append(copied("e", "embed.weight", (3, 2)))
    recorded.constants.append(Constant("embed.weight", whole((1, 2), 6), 0.0))
    manifest = {**MANIFEST, "e": TensorMeta("float32", (3, 2))}
    assert plan(recorded, manifest).groups[0].paddings[0].into.offset == 6


def test_a_rank_that_has_nothing_but_padding_of_a_parameter() -> None:
    recorded = recording()
    # As the vocabulary's last rank does: no row, from the end of the tensor on.
    nothing = Copied("e", whole((0, 2), 8), "embed.weight", whole((0, 2)))
    recorded.copies = [nothing if each.tensor == "e" else each for each in recorded.copies]
    recorded.constants = [Constant("embed.weight", whole((4, 2)), 0.0), Constant("embed.weight", whole((0, 2), 8), 0.0)]
    groups = plan(recorded).groups
    assert "e" not in {fill.piece.tensor for group in groups for fill in group.fills}
    assert [padding.into.count for group in groups for padding in group.paddings] == [8]


def refused_names(recorded: Recording) -> tuple[str, ...]:
    with pytest.raises(FetchError) as caught:
        plan(recorded)
    assert all(name in str(caught.value) for name in caught.value.tensors)
    return caught.value.tensors


def test_missing_parameters_are_listed() -> None:
    recorded = recording()
    recorded.copies = [each for each in recorded.copies if each.tensor not in ("norm", "1.k")]
    assert refused_names(recorded) == ("layers.1.qkv.weight", "norm.weight")


def test_parameters_filled_twice_are_listed() -> None:
    recorded = recording()
    recorded.copies += [copied("0.k", "layers.0.qkv.weight", (2, 2)), copied("norm", "norm.weight", (2,))]
    assert refused_names(recorded) == ("layers.0.qkv.weight", "norm.weight")


def test_tensors_that_loaders_refuse_are_listed() -> None:
    recorded = recording()
    recorded.refused = {"stranger": "no such parameter", "0.q": "size mismatch"}
    assert refused_names(recorded) == ("stranger", "0.q")


def test_what_a_loader_computes_cannot_be_replayed() -> None:
    recorded = recording()
    recorded.computed = {"norm.weight"}
    assert refused_names(recorded) == ("norm.weight",)


def test_a_tensor_of_which_the_ranks_leave_a_part_has_another_shape() -> None:
    manifest = {
        "a": TensorMeta("float32", (4, 2)),
        "b": TensorMeta("float32", (4,)),
        "head": TensorMeta("float32", (9,)),
    }
    halves = [Piece("a", ((0, 2), (0, 2))), Piece("a", ((2, 4), (0, 2)))]
    shared = [Piece("b", ((0, 4),)), Piece("b", ((0, 4),))]
    assert unread(manifest, [*halves, *shared]) == ()
    assert unread(manifest, [halves[0], *shared]) == ("a",)
