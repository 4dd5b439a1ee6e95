"""The model's own loaders, run on tensors without data: which part of which checkpoint tensor goes where.

The loaders run on a shadow of the model (`layers.py`) and on checkpoint tensors, all on torch's meta device. Slicing
there makes views as it does anywhere, so every copy that a loader makes names its two regions. `plan.py` makes a load
plan of the recording. vLLM's sharded RDT backend records in the same spirit, with a tensor class of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from connectors.vllm_plugin.weights.geometry import Region
from connectors.vllm_plugin.weights.recording import Constant, Copied, Recording
from connectors.weights.tensors import TensorMeta

LoadWeights = Callable[[Iterable[tuple[str, torch.Tensor]]], object]


def record(
    load_weights: LoadWeights, parameters: Mapping[str, torch.Tensor], manifest: Mapping[str, TensorMeta]
) -> Recording:
    """Run `load_weights`, whose model has `parameters` (on meta, storages of their own), on a checkpoint with
    `manifest`."""
    tensors = {
        name: torch.empty(meta.shape, dtype=getattr(torch, meta.dtype), device="meta")
        for name, meta in manifest.items()
    }
    recorder = _Recorder(parameters, tensors)
    with torch.no_grad(), recorder:
        recorder.recording.refused = _feed(load_weights, tensors)
    return recorder.recording


def _feed(load_weights: LoadWeights, tensors: Mapping[str, torch.Tensor]) -> dict[str, str]:
    """Offer all tensors. A refusal ends a loader's run, so the rest is offered again: an error should list all
    names."""
    names = iter(tensors)
    offered: list[str] = []
    refused: dict[str, str] = {}

    def rest() -> Iterator[tuple[str, torch.Tensor]]:
        for name in names:
            offered.append(name)
            yield name, tensors[name]

    while True:
        before = len(offered)
        try:
            load_weights(rest())
        except Exception as error:
            if len(offered) == before:
                raise
            refused[offered[-1]] = str(error).strip() or type(error).__name__
        else:
            return refused


class _Recorder(TorchDispatchMode):  # type: ignore[misc]
    def __init__(self, parameters: Mapping[str, torch.Tensor], tensors: Mapping[str, torch.Tensor]) -> None:
        super().__init__()
        self.recording = Recording()
        self._parameters = {_storage(tensor): name for name, tensor in parameters.items()}
        self._tensors = {_storage(tensor): name for name, tensor in tensors.items()}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        # Only an in-place operation changes a parameter; its first argument is what it changes.
        if func._schema.is_mutable and args and isinstance(args[0], torch.Tensor):
            parameter = self._parameters.get(_storage(args[0]))
            if parameter is not None:
                self._note(func, parameter, args)
        return func(*args, **(kwargs or {}))

    def _note(self, func: Any, parameter: str, args: tuple[Any, ...]) -> None:
        aten = torch.ops.aten
        into = _region(args[0])
        if func is aten.copy_.default and (tensor := self._tensors.get(_storage(args[1]))) is not None:
            source = _region(args[1].expand(args[0].shape))
            self.recording.copies.append(Copied(tensor, source, parameter, into))
        elif func is aten.zero_.default:
            self.recording.constants.append(Constant(parameter, into, 0.0))
        elif func is aten.fill_.Scalar:
            self.recording.constants.append(Constant(parameter, into, float(args[1])))
        else:
            self.recording.computed.add(parameter)


def _storage(tensor: torch.Tensor) -> int:
    """Names the storage of a tensor; on meta no address does."""
    return int(tensor.untyped_storage()._cdata)


def _region(tensor: torch.Tensor) -> Region:
    return Region(tuple(tensor.shape), tuple(tensor.stride()), tensor.storage_offset())
