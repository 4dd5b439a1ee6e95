"""What every publisher is to a trainer, whatever its transport: `path.py`, `store.py` and `nixl.py` are three.

publisher = NixlPublisher(host=...)                      # once, on every rank
publication = publisher.publish(model, "step-100")       # after an optimizer step, on every rank
push(publication.source)                                 # on one rank, to the job's control plane: README.md
publication.wait_done(timeout_s=600)                     # on every rank, before the next step
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import torch
from torch import nn

from connectors.weights.source import SourceInfo


class Publication(Protocol):
    """One version that engines can load."""

    @property
    def source(self) -> SourceInfo:
        """For the engines; the same on all ranks."""
        ...

    def wait_done(self, timeout_s: float, readers: int | None = None) -> None:
        """Return when this rank may change its weights; call it on every rank.

        `readers` is how many generator ranks are going to load the version; None: as many as come until a control plane
        says that no more will. After `timeout_s` nobody is waited for any more. A publisher that has copied the weights
        waits for nobody.
        """
        ...


class Publisher(Protocol):
    """Collective: every call is made on all ranks, in the same order."""

    def publish(self, source: nn.Module | Mapping[str, torch.Tensor], version: str) -> Publication:
        """A module (FSDP2 too) or a state dict, of plain tensors and DTensors, whose names are the checkpoint's.
        Nothing is gathered. Until `Publication.wait_done` has returned the weights stay as they are."""
        ...

    def close(self) -> None:
        """Idempotent."""
        ...
