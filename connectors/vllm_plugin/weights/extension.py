"""`rank.py`, and the rank's share of the pool, as methods of vLLM's worker: `--worker-extension-cls
connectors.vllm_plugin.weights.extension.WorkerExtension`.

vLLM's collective call reaches them by name on all ranks; `vllm_plugin/rank_calls.py` makes the calls.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from vllm.config import set_current_vllm_config
from vllm.distributed.kv_transfer import has_kv_transfer_group

from connectors.vllm_plugin.handoffs import end_leases
from connectors.vllm_plugin.register import register
from connectors.vllm_plugin.weights.backend import HeadraceWeightEngine
from connectors.vllm_plugin.weights.rank import RankWeights, rank_of_engine
from connectors.vllm_plugin.weights.verdict import RankReport

# The entry point does the same where Headrace is installed. An interpreter that finds it by PYTHONPATH has no entry
# points; vLLM imports this module in every worker before it looks for the backend.
register()


class WorkerExtension:
    """vLLM mixes it into its worker; a worker has no attribute of these names."""

    headrace_rank: RankWeights | None = None

    def headrace_weights(self, command: Mapping[str, Any]) -> dict[str, Any]:
        """Carry out a `WeightCommand`, return a `RankReport`, both as data for the wire. Never raises."""
        worker: Any = self
        try:
            if self.headrace_rank is None:
                self.headrace_rank = _rank_of(worker)
            if command.get("name") == "reset":
                _end_session(worker)
            with set_current_vllm_config(worker.vllm_config):
                return self.headrace_rank.answer(command)
        except Exception as error:
            # Whatever it is, it must not be raised (see `verdict.py`).
            return _report(worker, str(command.get("call")), error).to_wire()

    def headrace_pool(self, call: str, epoch: int | None) -> dict[str, Any]:
        """Use the pool for requests of `epoch` alone; None: not at all. Returns a `RankReport`; never raises."""
        try:
            if has_kv_transfer_group():
                # vLLM's store connector is imported only where an engine has a connector.
                from connectors.vllm_plugin.epoch_store import move_to_epoch

                move_to_epoch(epoch)
            return _report(self, call).to_wire()
        except Exception as error:
            return _report(self, call, error).to_wire()

    def headrace_drop_handoffs(self, call: str) -> dict[str, Any]:
        """Nobody is going to read the handoffs of this worker. Returns a `RankReport`; never raises."""
        try:
            if has_kv_transfer_group():
                end_leases()
            return _report(self, call).to_wire()
        except Exception as error:
            return _report(self, call, error).to_wire()


def _report(worker: Any, call: str, error: Exception | None = None) -> RankReport:
    """Of a call that says nothing about weights."""
    size = worker.vllm_config.parallel_config.world_size
    text = "" if error is None else f"{type(error).__name__}: {error}"
    return RankReport(call=call, rank=worker.rank % size, ranks=size, ok=error is None, error=text)


def _rank_of(worker: Any) -> RankWeights:
    """That of the weight transfer engine, where it is ours: one rank has one state."""
    engine = getattr(worker, "weight_transfer_engine", None)
    if isinstance(engine, HeadraceWeightEngine):
        rank: RankWeights = engine.rank
        return rank
    return rank_of_engine(worker.model_runner.get_model(), worker.vllm_config)


def _end_session(worker: Any) -> None:
    """Forget an update of vLLM's own that was started and never finished.

    vLLM has no public call for it; its worker refuses the next start with an exception, which breaks engines with
    several ranks.
    """
    worker._weight_update_active = False
    engine = getattr(worker, "weight_transfer_engine", None)
    if engine is not None and hasattr(engine, "reset_weight_update_target"):
        engine.reset_weight_update_target()
