"""An engine as a source: its ranks serve the version they hold to peers by `nixl`, as trainer ranks do.

So the current version stays loadable when the trainer has moved on. `rank.py` starts and stops it: what is served
must not change, so it is stopped before a load.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from connectors.vllm_plugin.weights.agreement import EngineRanks
from connectors.vllm_plugin.weights.host_copy import HostCopy
from connectors.vllm_plugin.weights.plan import LoadPlan
from connectors.vllm_plugin.weights.rooms import part_of
from connectors.weights.holdings import Holding, dtype_name
from connectors.weights.source import FetchError
from connectors.weights.tensors import TensorMeta

if TYPE_CHECKING:
    from connectors.weights.nixl.server import NixlPublication, NixlServer

WAIT_S = 60.0
"""For the other ranks, when a version begins or ends to be served."""
CUT_OFF_S = 10.0
"""For peers that still read when a load begins."""


class PeerService:
    """What one rank serves."""

    def __init__(self, ranks: EngineRanks, host: str) -> None:
        self._ranks = ranks
        self._host = host
        self._server: NixlServer | None = None
        self._publication: NixlPublication | None = None
        self.serves_copy = False
        """Whether some rank serves its copy in host memory."""

    @property
    def source(self) -> dict[str, Any] | None:
        """Under which this engine's weights can be read."""
        return None if self._publication is None else dict(self._publication.source)

    def serve(
        self, version: str, manifest: dict[str, TensorMeta], model: nn.Module, plan: LoadPlan, copy: HostCopy | None
    ) -> None:
        """All ranks of the engine together. Raises FetchError where this model's weights cannot be served."""
        failure, held, metas = "", list[Holding](), dict[str, TensorMeta]()
        try:
            self.stop()
            held = _of_copy(copy) if copy is not None else _of_model(model, plan)
            metas = {
                each.piece.tensor: TensorMeta(dtype_name(each.tensor.dtype), manifest[each.piece.tensor].shape)
                for each in held
            }
            if self._server is None:
                from connectors.weights.nixl.server import NixlServer

                self._server = NixlServer(host=self._host)
        except Exception as error:  # The other ranks wait for this one: it tells them.
            failure = f"{type(error).__name__}: {error}"
        everybody = self._ranks.gather((failure, metas, copy is not None), WAIT_S)
        failures = [f"rank {rank}: {text}" for rank, (text, _, _) in enumerate(everybody) if text]
        if failures:
            raise FetchError("; ".join(failures))
        assert self._server is not None
        of_all = {name: meta for _, part, _ in everybody for name, meta in part.items()}
        from connectors.weights.nixl.server import ServeError

        try:
            self._publication = self._server.serve(version, of_all, held, rank=self._ranks.rank, gather=self._gather)
        except ServeError as error:
            raise FetchError(str(error)) from error
        self.serves_copy = any(is_copy for _, _, is_copy in everybody)

    def stop(self) -> None:
        """Peers that still read are cut off; all ranks of the engine together."""
        if self._publication is not None:
            publication, self._publication = self._publication, None
            publication.wait_done(CUT_OFF_S, readers=0)

    def close(self) -> None:
        if self._server is not None:
            self._server.close()
            self._server = self._publication = None

    def _gather(self, mine: Any) -> Sequence[Any]:
        return self._ranks.gather(mine, WAIT_S)


def _of_copy(copy: HostCopy) -> list[Holding]:
    return [Holding(target.piece, target.into) for group in copy.targets for target in group]


def _of_model(model: nn.Module, plan: LoadPlan) -> list[Holding]:
    processed = [name for group in plan.groups for name in group.processed]
    if processed:
        raise FetchError(
            f"the weights of {processed[0]} and others are not as the trainer sends them any more: serve a copy in host"
            " memory (mode cpu_prefetch, keep_copy)"
        )
    parameters: dict[str, torch.Tensor] = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    return [
        Holding(fill.piece, part_of(parameters[fill.parameter].detach(), fill.into))
        for group in plan.groups
        for fill in group.fills
    ]
