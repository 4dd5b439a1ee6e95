"""Keeps a rank's load plan: recorded when a version's manifest is first seen, replayed as long as manifests are equal.

`rank.py` owns it; transports call `groups` when they know the manifest of a version.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence

from torch import nn

from connectors.vllm_plugin.weights import layers
from connectors.vllm_plugin.weights.plan import LoadPlan, plan_load, unread
from connectors.vllm_plugin.weights.recorder import record
from connectors.vllm_plugin.weights.rooms import Rooms
from connectors.weights.source import FetchError
from connectors.weights.tensors import Piece, TensorMeta, digest_of


class Planner:
    """The load plan of one model."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._manifest: dict[str, TensorMeta] | None = None
        self._plan: LoadPlan | None = None
        self._rooms: Rooms | None = None
        self.is_checked = False
        """Whether `check` has passed for the plan."""
        self.digest = ""
        """Of the manifest: the same on all ranks that have seen the same one."""
        self.seconds = 0.0
        """What the last `groups` took."""

    @property
    def plan(self) -> LoadPlan:
        assert self._plan is not None, "a version was opened before"
        return self._plan

    @property
    def rooms(self) -> Rooms:
        """Of that plan."""
        if self._rooms is None:
            self._rooms = Rooms(self._model, self.plan)
        return self._rooms

    @property
    def manifest(self) -> dict[str, TensorMeta]:
        """Of the versions that the plan is for."""
        assert self._manifest is not None, "a version was opened before"
        return self._manifest

    def groups(self, manifest: Mapping[str, TensorMeta]) -> Sequence[Sequence[Piece]]:
        """A `Plan` of transports. Raises FetchError that lists what the model and the manifest do not agree on."""
        started = time.perf_counter()
        if self._plan is None or manifest != self._manifest:
            # The plan before stays where there is no new one: the next version may be like the last good one.
            self._plan, self._manifest, self._rooms = self._record(manifest), dict(manifest), None
            self.is_checked, self.digest = False, digest_of(manifest)
        self.seconds = time.perf_counter() - started
        return self._plan.pieces

    def _record(self, manifest: Mapping[str, TensorMeta]) -> LoadPlan:
        shadow = layers.shadow_of(self._model)
        tensors = {name: tensor for name, _, _, tensor in layers.named_tensors(shadow)}
        facts = layers.parameter_facts(shadow, self._model)
        plan = plan_load(record(shadow.load_weights, tensors, manifest), manifest, facts)
        in_place = {
            fill.parameter for group in plan.groups for fill in group.fills if not facts[fill.parameter].is_processed
        }
        if moved := layers.moved_in_memory(self._model, {name: facts[name] for name in in_place}):
            raise FetchError(f"parameters that are not as the model's loader left them: {', '.join(moved)}", moved)
        return plan

    @property
    def pieces(self) -> tuple[Piece, ...]:
        """All that the plan takes."""
        return tuple(piece for group in self.plan.pieces for piece in group)

    def check(self, pieces_of_all_ranks: Sequence[Piece]) -> None:
        """Raises FetchError where the ranks together leave a part of a tensor: the model has another shape for it."""
        names = unread(self.manifest, pieces_of_all_ranks)
        if names:
            raise FetchError(
                f"of these tensors the model takes only a part, so it has other shapes: {', '.join(names)}", names
            )
        self.is_checked = True
