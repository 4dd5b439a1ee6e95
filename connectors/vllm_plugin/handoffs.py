"""Handoffs of a prefill engine that nobody is going to read: their leases are ended, in a worker.

A leg that is cancelled as it ends leaves one behind, and so does a decode leg that is cancelled before its engine has
it. A pause waits for handoffs; it would wait for a whole lease. `unread.py` asks for this from the API server.
"""

from __future__ import annotations

import time
from typing import Any

from vllm.distributed.kv_transfer import get_kv_transfer_group


def end_leases() -> None:
    """vLLM gives the handoffs up at its next step, as it does once a lease is over.

    Raises:
        LookupError: no connector of this engine keeps leases where vLLM 0.32's does.
    """
    connector = get_kv_transfer_group()
    parts: list[Any] = getattr(connector, "_connectors", [connector])
    workers = [getattr(part, "connector_worker", None) for part in parts]
    kept = [worker._reqs_to_send for worker in workers if worker is not None and hasattr(worker, "_reqs_to_send")]
    if not kept:
        raise LookupError("no connector of this engine keeps leases of handoffs")
    for leases in kept:
        leases.update(dict.fromkeys(leases, time.perf_counter()))
