"""Handoffs of a prefill engine that nobody is going to read: their leases are ended, in a worker.

A leg that is cancelled as it ends leaves one behind, and so does a decode leg that is cancelled before its engine has
it. A pause waits for handoffs; it would wait for a whole lease. `unread.py` asks for this from the API server.
"""

from __future__ import annotations

import time

from vllm.distributed.kv_transfer import get_kv_transfer_group


def end_leases() -> int:
    """Returns of how many handoffs. vLLM gives them up at its next step, as it does once a lease is over."""
    connector = get_kv_transfer_group()
    ended = 0
    for each in getattr(connector, "_connectors", [connector]):
        leases = getattr(getattr(each, "connector_worker", None), "_reqs_to_send", {})
        ended += len(leases)
        leases.update(dict.fromkeys(leases, time.perf_counter()))
    return ended
