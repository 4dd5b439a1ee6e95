"""Command lines and environment of the pool's own processes."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from connectors.engine_env import cpu_binding, store_environment
from connectors.mooncake import TCP_ENVIRONMENT, client_config, derive_cache_prefix, transfer_port_environment
from connectors.store_argv import ClientSettings, MasterSettings, client_argv, client_environment, master_argv

MASTER = MasterSettings(
    program="/bin/mooncake_master",
    bind_host="127.0.0.1",
    rpc_port=100,
    metrics_port=101,
    lease_ttl_s=60.0,
    disk_tier=False,
    extra_flags={},
)
CLIENT = ClientSettings(
    program="/bin/mooncake_client",
    host="10.0.0.1",
    port=200,
    transfer_ports=(201, 6),
    master_address="10.0.0.9:100",
    protocol="tcp",
    device_names=(),
    segment_bytes=2**28,
    disk_path=None,
    disk_bytes=None,
)


def test_a29_the_master_is_told_every_port() -> None:
    assert master_argv(MASTER) == (
        "/bin/mooncake_master",
        "--client_ttl=30",
        "--default_kv_lease_ttl=60000",
        "--metrics_host=127.0.0.1",
        "--metrics_port=101",
        "--rpc_address=127.0.0.1",
        "--rpc_port=100",
    )


def test_further_flags_of_the_master_under_either_spelling() -> None:
    argv = master_argv(replace(MASTER, disk_tier=True, extra_flags={"eviction-ratio": 0.1, "allow_evict": False}))
    assert argv[1:6] == (
        "--allow_evict=false",
        "--client_ttl=30",
        "--default_kv_lease_ttl=60000",
        "--enable_offload=true",
        "--eviction_ratio=0.1",
    )


def test_a_client_lends_all_of_a_nodes_capacity() -> None:
    assert client_argv(CLIENT) == (
        "/bin/mooncake_client",
        "--global_segment_size=268435456",
        "--host=10.0.0.1",
        "--master_server_address=10.0.0.9:100",
        "--metadata_server=P2PHANDSHAKE",
        "--port=200",
        "--protocol=tcp",
    )
    assert client_environment(CLIENT) == {**transfer_port_environment(201, 6), **TCP_ENVIRONMENT}


def test_a_client_with_a_disk_tier_over_rdma() -> None:
    settings = replace(CLIENT, protocol="rdma", device_names=("mlx5_0", "mlx5_1"), disk_path="/nvme/k v", disk_bytes=10)
    argv, env = client_argv(settings), client_environment(settings)
    assert {"--device_names=mlx5_0,mlx5_1", "--enable_offload=true"} <= set(argv)
    assert env == {
        **transfer_port_environment(201, 6),
        "MOONCAKE_OFFLOAD_FSDIR": "/nvme/k v",
        "MOONCAKE_OFFLOAD_FILE_STORAGE_PATH": "/nvme/k v",
        "MOONCAKE_OFFLOAD_ENABLE_EVICTION": "true",
        "MOONCAKE_OFFLOAD_TOTAL_SIZE_LIMIT_BYTES": "10",
    }


@pytest.mark.parametrize("count", [6, 12, 48])
def test_port_ranges_of_a_store_client_do_not_touch(count: int) -> None:
    low, high, rpc_low, rpc_high = map(int, transfer_port_environment(1000, count).values())
    assert 1000 == low < high < rpc_low < rpc_high == 1000 + count - 1


def test_engines_lend_nothing_themselves() -> None:
    text = client_config(
        master_address="h:1", protocol="rdma", device_names=("a", "b"), local_buffer_bytes=5, disk_tier=True
    )
    assert json.loads(text) == {
        "mode": "standalone-store",
        "metadata_server": "P2PHANDSHAKE",
        "master_server_address": "h:1",
        "global_segment_size": 0,
        "local_buffer_size": 5,
        "protocol": "rdma",
        "device_name": "a,b",
        "enable_offload": True,
    }


@pytest.mark.parametrize(("protocol", "tuned"), [("tcp", True), ("rdma", False)])
def test_tcp_is_tuned_in_engines_too(protocol: str, tuned: bool) -> None:
    env = store_environment(
        config_path="/c", advertised_host="h", protocol="tcp" if protocol == "tcp" else "rdma", ports=(300, 6)
    )
    assert (env.items() >= TCP_ENVIRONMENT.items()) is tuned


def test_a20_a_prefix_depends_on_the_job_and_all_of_its_identity() -> None:
    prefix = derive_cache_prefix("a", {"x": 1, "y": None})
    assert prefix == derive_cache_prefix("a", {"y": None, "x": 1})
    assert prefix.startswith("a-")
    others = [derive_cache_prefix("b", {"x": 1, "y": None}), derive_cache_prefix("a", {"x": 2, "y": None})]
    assert prefix.split("-")[1] in others[0]
    assert prefix not in others


def test_core_binding() -> None:
    assert cpu_binding([(0, 1), (2, 3)]) == "0,1|2,3"
    assert cpu_binding([(5,)]) == "5"
