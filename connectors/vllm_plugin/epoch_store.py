"""vLLM's store connector, kept to epochs: `kv_connector_module_path` of its entry in the chain names this module.

The scheduler's side notes which epoch each request was dispatched in, which its salt says. The workers' side lets a
request load and save only while the engine is in that very epoch: so a request that lives through new weights, or is
late, leaves nothing behind, and an engine without an epoch neither reads nor writes. `weights/extension.py` moves it
at the fence's word. vLLM counts connectors by the name of their class, so this one has the stock one's.

A key prefix that can be changed while an engine runs would be public API enough. Without one, what this changes is
vLLM's own: the worker's store, and how its threads handle one transfer.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from vllm.distributed.kv_transfer import get_kv_transfer_group
from vllm.distributed.kv_transfer.kv_connector.v1.mooncake.store import connector as stock

from connectors.vllm_plugin.epoch_view import EpochView
from connectors.vllm_plugin.pool_keys import epoch_of
from connectors.vllm_plugin.weights.settings import WORKER_EXTENSION


class MooncakeStoreConnector(stock.MooncakeStoreConnector):  # type: ignore[misc]
    """See the module text."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any = None) -> None:
        """Raises ValueError where nothing could ever bring this engine into an epoch."""
        if vllm_config.parallel_config.worker_extension_cls != WORKER_EXTENSION:
            raise ValueError(f"{__name__} needs --worker-extension-cls {WORKER_EXTENSION}")
        super().__init__(vllm_config, role, kv_cache_config)
        self._epochs: dict[str, int | None] = {}
        """Request id -> the epoch it was dispatched in; the scheduler's side."""
        self._view: EpochView | None = None
        if self.connector_worker is not None:
            cache_prefix = vllm_config.kv_transfer_config.kv_connector_extra_config["cache_prefix"]
            self._view = EpochView(self.connector_worker.store, cache_prefix)
            _put_before_store(self.connector_worker, self._view)

    def move_to_epoch(self, epoch: int | None) -> None:
        """The worker's side: read and write under another epoch from the next request on; None: not at all."""
        assert self._view is not None
        self._view.move(epoch)

    def on_new_request(self, request: Any) -> None:
        super().on_new_request(request)
        self._epochs[request.request_id] = epoch_of(request.cache_salt)

    def build_connector_meta(self, scheduler_output: Any) -> Any:
        meta = super().build_connector_meta(scheduler_output)
        for transfer in meta.requests:
            transfer.headrace_epoch = self._epochs.get(transfer.req_id)
        for request_id in scheduler_output.finished_req_ids:
            self._epochs.pop(request_id, None)
        return meta


def move_to_epoch(epoch: int | None) -> None:
    """Move this worker's share of the pool, where its engine has one that is kept to epochs."""
    connector = get_kv_transfer_group()
    for each in getattr(connector, "_connectors", [connector]):
        if isinstance(each, MooncakeStoreConnector):
            each.move_to_epoch(epoch)


def _put_before_store(worker: Any, view: EpochView) -> None:
    """All that the worker and its transfer threads ask of the store goes through `view`."""
    worker.store = view
    start_threads = worker.register_kv_caches

    def start_bound_threads(*given: Any) -> None:
        start_threads(*given)
        if worker.kv_send_thread is not None:
            _bind(worker.kv_send_thread, view, saves=True)
        for thread in worker.kv_recv_threads:
            _bind(thread, view, saves=False)

    worker.register_kv_caches = start_bound_threads


def _bind(thread: Any, view: EpochView, *, saves: bool) -> None:
    """Let each transfer of a thread, which waits for its first one, keep to its request's epoch."""
    thread._handle_request = partial(_transfer, thread._handle_request, view, saves)


def _transfer(handle: Any, view: EpochView, saves: bool, transfer: Any) -> None:
    with view.transfer(transfer.headrace_epoch, saves=saves):
        handle(transfer)
