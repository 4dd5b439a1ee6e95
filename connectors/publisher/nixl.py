"""Publishes versions by leaving them where they are: engines read the shards of all ranks with one-sided reads.

No rank gathers or copies anything, so the weights must not change before `wait_done` has returned.
`connectors/weights/nixl/` has both sides.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import distributed, nn

from connectors.publisher.ranks import PublishError, Ranks
from connectors.weights.holdings import holdings
from connectors.weights.nixl.server import LEASE_S, NixlPublication, NixlServer, ServeError


class NixlPublisher:
    """Serves one version at a time; the next `publish` ends the one before."""

    def __init__(
        self, *, host: str, port: int = 0, lease_s: float = LEASE_S, group: distributed.ProcessGroup | None = None
    ) -> None:
        """`host`: where engines reach this rank; every rank has its own. `port` 0: any. `lease_s`: for how long an
        engine that died in the middle of a load may hold up the trainer."""
        self._ranks = Ranks(group)
        self._server = self._ranks.each(lambda: NixlServer(host=host, port=port, lease_s=lease_s))

    def publish(self, source: nn.Module | Mapping[str, torch.Tensor], version: str) -> NixlPublication:
        tensors, held = self._ranks.each(lambda: holdings(source))
        try:
            return self._server.serve(version, tensors, held, rank=self._ranks.rank, gather=self._ranks.gather)
        except ServeError as error:
            raise PublishError(str(error)) from error

    @property
    def attended(self) -> int:
        """How many ranks of engines read from this rank now."""
        return self._server.attended

    def close(self) -> None:
        self._server.close()
