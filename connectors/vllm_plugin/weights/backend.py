"""The `headrace` backend of vLLM's own weight routes: `--weight-transfer-config '{"backend": "headrace"}'`.

One `update_weights` per version, whose `update_info` is a source. Nothing here raises in a worker; what went wrong
stands in the rank's report, which the fence asks for before it lets vLLM's answer through
(`vllm_plugin/weight_routes.py`).
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import nn
from vllm.config import VllmConfig
from vllm.config.weight_transfer import WeightTransferConfig
from vllm.distributed.weight_transfer.base import WeightTransferEngine, WeightTransferInitInfo, WeightTransferUpdateInfo

from connectors.vllm_plugin.weights.rank import rank_of_engine


@dataclass
class HeadraceInitInfo(WeightTransferInitInfo):  # type: ignore[misc]
    """Nothing has to be set up before the first source is known."""


@dataclass
class HeadraceUpdateInfo(WeightTransferUpdateInfo):  # type: ignore[misc]
    """A load, as `WeightCommand` has it."""

    source: dict[str, Any] = field(default_factory=dict)
    mode: str | None = None
    check_finite: bool = False
    timeout_s: float = 60.0
    limit_s: float = 600.0


class HeadraceWeightEngine(WeightTransferEngine[HeadraceInitInfo, HeadraceUpdateInfo]):  # type: ignore[misc]
    """vLLM makes one per worker, when the model is loaded."""

    init_info_cls = HeadraceInitInfo
    update_info_cls = HeadraceUpdateInfo
    supports_draft_weight_update = False

    def __init__(
        self, config: WeightTransferConfig, vllm_config: VllmConfig, device: torch.device, model: nn.Module
    ) -> None:
        """Raises ValueError where this model's weights cannot be replaced as the engine is set: it does not start
        then."""
        super().__init__(config, vllm_config, device, model)
        self.rank = rank_of_engine(model, vllm_config)

    def init_transfer_engine(self, init_info: HeadraceInitInfo) -> None:
        """Sources come with each update."""

    def start_weight_update(self) -> None:
        self.rank.answer({"name": "reset", "call": "start"})

    def update_weights(self, update_info: dict[str, Any]) -> None:
        self.rank.answer({"name": "load", "call": "update", **update_info})

    def receive_weights(self, update_info: HeadraceUpdateInfo) -> None:
        self.update_weights(asdict(update_info))

    def finish_weight_update(self) -> None:
        """A load is finished when it returns."""

    def shutdown(self) -> None:
        self.rank.close()
