"""Entry point of the group `vllm.general_plugins`: vLLM calls it once in each of its processes.

It makes the backend of `weights/backend.py` known by name and lets what waits rest (`resting.py`); everything else
of the plug-in is named on the command line.
"""

from __future__ import annotations

import os
from contextlib import suppress

from connectors.vllm_plugin.resting import REST_VARIABLE, rest_while_waiting
from connectors.vllm_plugin.weights.settings import BACKEND


def register() -> None:
    if rest := os.environ.get(REST_VARIABLE):
        rest_while_waiting(rest)
    # vLLM calls plug-ins in processes that never load a model too: the class is imported on use.
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

    # vLLM may load a plug-in more than once.
    with suppress(ValueError):
        WeightTransferEngineFactory.register_engine(
            BACKEND, "connectors.vllm_plugin.weights.backend", "HeadraceWeightEngine"
        )
