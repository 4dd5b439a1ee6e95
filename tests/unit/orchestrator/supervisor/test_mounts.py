"""[A31] Whose memory does a master not count, and since when?"""

from __future__ import annotations

from dataclasses import replace

from orchestrator.plan.types import StorageClientPlan
from orchestrator.supervisor.mounts import MOUNTS_WITHIN_S, Mounts, unmounted

FIRST = StorageClientPlan(
    name="storage-prefill-0", node="n0", segment_bytes=1, address="10.0.0.1", name_ports=(20_000, 20_002)
)
SECOND = replace(FIRST, name="storage-decode-0", name_ports=(20_006, 20_008))
OTHER_NODE = replace(FIRST, name="storage-prefill-1", node="n1", address="10.0.0.2")


def test_a_client_is_mounted_by_any_of_its_name_ports_on_its_own_node() -> None:
    clients = (FIRST, SECOND, OTHER_NODE)
    assert unmounted(clients, set()) == {"storage-prefill-0", "storage-decode-0", "storage-prefill-1"}
    segments = {("10.0.0.1", 20_001), ("10.0.0.1", 20_008), ("10.0.0.9", 20_000)}
    assert unmounted(clients, segments) == {"storage-decode-0", "storage-prefill-1"}


def test_one_that_is_missed_for_long_is_told_once_per_limit() -> None:
    mounts = Mounts()
    assert mounts.overdue({"a", "b"}, 0.0) == set()
    assert mounts.overdue({"a"}, MOUNTS_WITHIN_S) == set()
    assert mounts.overdue({"a", "b"}, MOUNTS_WITHIN_S + 1) == {"a"}
    assert mounts.overdue({"a", "b"}, MOUNTS_WITHIN_S + 2) == set()
    assert mounts.overdue({"a"}, 2 * MOUNTS_WITHIN_S + 3) == {"a"}
