"""One master: one lease, one disk path, somebody who lends."""

from __future__ import annotations

from typing import Any

import pytest

from connectors.types import JsonDict
from tests.unit.orchestrator.samples import (
    GIB,
    MOONCAKE,
    assert_error,
    facts_of,
    node,
    pd_data,
    plan_of,
    unit,
    warning_at,
)

DISK: JsonDict = {"disk": {"path": "/nvme/kv"}}


def roles(**decode: Any) -> JsonDict:
    return {"roles": {"decode": decode}}


def test_two_disk_paths_are_refused() -> None:
    data = pd_data(kv_offload={**MOONCAKE, **DISK}, **roles(kv_offload={"disk": {"path": "/ssd"}}))
    field = "roles.decode.kv_offload.disk.path"
    assert_error(data, field, "decode has /ssd, prefill has /nvme/kv", "give both roles the same")


def test_all_lenders_have_the_disk_or_none() -> None:
    data = pd_data(roles={"prefill": {"kv_offload": DISK}, "decode": {"kv_offload": {"cpu": {"num_bytes": 1}}}})
    assert_error(
        data,
        "roles.decode.kv_offload.disk",
        "decode lends capacity without a disk, prefill has /nvme/kv",
        "same disk path",
    )


def test_a_disk_on_a_role_that_lends_nothing() -> None:
    inherited = pd_data(kv_offload={**MOONCAKE, **DISK})
    assert plan_of(inherited).findings == ()
    named = pd_data(kv_offload={**MOONCAKE, **DISK}, **roles(kv_offload=DISK))
    assert "has no effect" in warning_at(plan_of(named), "roles.decode.kv_offload.disk").problem


def test_two_storage_clients_do_not_share_a_folder() -> None:
    data = pd_data(kv_offload={**MOONCAKE, **DISK}, **roles(kv_offload={"cpu": {"num_bytes": 1}}))
    problem = "prefill and decode both lend on n0, with /nvme/kv"
    assert_error(data, "kv_offload.disk.path", problem, "roles.decode.kv_offload.cpu.num_bytes = 0")
    assert plan_of(data, facts_of(node(0), node(1))).errors == ()


def test_two_leases_are_refused() -> None:
    data = pd_data(pool={"lease_ttl": "1m"}, **roles(kv_offload={"lease_ttl": "30s"}))
    assert_error(data, "roles.decode.kv_offload.lease_ttl", "is 30 s, pool.lease_ttl is 60 s", "give one value")
    two = pd_data(kv_offload={**MOONCAKE, "lease_ttl": 20}, **roles(kv_offload={"lease_ttl": 30}))
    assert_error(two, "roles.decode.kv_offload.lease_ttl", "is 30 s, kv_offload.lease_ttl is 20 s")


def test_a22_a_lease_below_a_second_is_refused() -> None:
    assert_error(pd_data(pool={"lease_ttl": "500ms"}), "pool.lease_ttl", "is 500 ms", "use 1s or more")
    assert "cannot be evicted" in warning_at(plan_of(pd_data(pool={"lease_ttl": "1h"})), "pool.lease_ttl").problem


def test_a22_the_lease_reaches_the_master_in_milliseconds() -> None:
    master = unit(plan_of(pd_data(pool={"lease_ttl": "1.5s"})), "mooncake-master")
    assert "--default_kv_lease_ttl=1500" in master.argv


@pytest.mark.parametrize("flag", ["root_fs_dir", "root-fs-dir", "enable_ha"])
def test_flags_that_a_disk_tier_forbids(flag: str) -> None:
    flags = {"master_flags": {flag: "x"}}
    data = pd_data(kv_offload={**MOONCAKE, **DISK}, pool=flags)
    assert_error(data, f"pool.master_flags.{flag}", "set together with kv_offload.disk", "drop one")
    assert plan_of(pd_data(pool=flags)).errors == ()


def test_a_pool_that_nobody_lends_to() -> None:
    data = pd_data(kv_offload={**MOONCAKE, "cpu": {"num_bytes": 0}})
    assert_error(data, "kv_offload.cpu.num_bytes", "is 0 on every role (prefill, decode)")
    assert plan_of({**data, "trainer_storage": {"num_bytes": GIB}}).errors == ()
    assert plan_of({**data, "pool": {"master": "10.0.0.9:50051"}}).errors == ()


def test_trainer_storage() -> None:
    lends = {"trainer_storage": {"num_bytes": "1GiB"}}
    no_pool = pd_data(kv_offload="none", **lends, **roles(kv_offload="none"))
    assert_error(no_pool, "trainer_storage", "no role joins", 'kv_offload.type = "mooncake"')
    for nodes, says in (
        (["n9"], "'n9' is no node of this job; name nodes of the job: n0"),
        (["n0"] * 2, "named 2 times"),
    ):
        data = pd_data(trainer_storage={"num_bytes": 1, "nodes": nodes})
        assert_error(data, "trainer_storage.nodes", says)


def test_what_a_joined_master_has_of_its_own_cannot_be_set() -> None:
    assert plan_of(pd_data(pool={"master": "10.0.0.9:50051"})).findings == ()
    ignored = plan_of(pd_data(pool={"master": "10.0.0.9:50051", "lease_ttl": 5}))
    assert "no effect on the running master 10.0.0.9:50051" in warning_at(ignored, "pool.lease_ttl").problem
