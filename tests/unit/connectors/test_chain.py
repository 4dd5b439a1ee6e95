"""The chain of one role as one kv_transfer_config."""

from __future__ import annotations

from dataclasses import replace

import pytest

from connectors.chain import ChainParts, NativeTier, read_transfer_config, transfer_config
from connectors.mooncake import StoreSettings
from connectors.nixl import NixlSettings
from connectors.types import JsonDict, Role
from tests.unit.orchestrator.samples import GPU

HANDOFF = NixlSettings(lease_s=20, num_threads=2, cross_layers_blocks=False)
STORE = StoreSettings(cache_prefix="p", save_decode_cache=True, cross_layers_blocks=False, by_epoch=False)
NIXL_EXTRA = {"num_threads": 2, "kv_lease_duration": 20}


def parts(
    handoff: NixlSettings | None = None, store: StoreSettings | None = None, native: NativeTier | None = None
) -> ChainParts:
    return ChainParts(handoff=handoff, store=store, native=native)


@pytest.mark.parametrize(("role", "kv_role"), [("prefill", "kv_producer"), ("decode", "kv_consumer")])
def test_handoff_then_store(role: Role, kv_role: str) -> None:
    assert transfer_config(role, parts(HANDOFF, STORE), GPU) == {
        "kv_connector": "MultiConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {
            "connectors": [
                {"kv_connector": "NixlConnector", "kv_role": kv_role, "kv_connector_extra_config": NIXL_EXTRA},
                {
                    "kv_connector": "MooncakeStoreConnector",
                    "kv_role": "kv_both",
                    "kv_connector_extra_config": {"cache_prefix": "p", "load_async": True, "save_decode_cache": True},
                },
            ]
        },
        "kv_load_failure_policy": "recompute",
    }


@pytest.mark.parametrize(
    ("disk", "more"),
    [
        (None, {}),
        (
            "/nvme/k v",
            {"spec_name": "TieringOffloadingSpec", "secondary_tiers": [{"type": "fs", "root_dir": "/nvme/k v"}]},
        ),
    ],
)
def test_one_connector_stands_alone(disk: str | None, more: JsonDict) -> None:
    assert transfer_config("colocated", parts(native=NativeTier(cpu_bytes=5, disk_path=disk)), GPU) == {
        "kv_connector": "OffloadingConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"cpu_bytes_to_use": 5, **more},
        "kv_load_failure_policy": "recompute",
    }


def test_nothing_is_no_config() -> None:
    assert transfer_config("colocated", parts(), GPU) is None


def test_what_an_engine_does_not_read_is_left_out() -> None:
    old = replace(GPU, handoff_lease=False, load_failure_policy=False)
    config = transfer_config("decode", parts(replace(HANDOFF, cross_layers_blocks=True)), old)
    assert config == {
        "kv_connector": "NixlConnector",
        "kv_role": "kv_consumer",
        "kv_connector_extra_config": {"num_threads": 2, "enable_cross_layers_blocks": "True"},
    }


def multi(*children: object) -> JsonDict:
    return {"kv_connector": "MultiConnector", "kv_connector_extra_config": {"connectors": list(children)}}


NIXL_60 = {"kv_connector": "NixlConnector", "kv_connector_extra_config": {"kv_lease_duration": 60}}
STORE_CHILD = {"kv_connector": "MooncakeStoreConnector"}


@pytest.mark.parametrize(
    ("config", "names", "lease", "lease_named"),
    [
        ({}, (), None, False),
        ({"kv_connector": "NixlConnector"}, ("NixlConnector",), 30, False),
        ({"kv_connector": "NixlConnector", "kv_connector_extra_config": "x"}, ("NixlConnector",), 30, False),
        (NIXL_60, ("NixlConnector",), 60, True),
        ({"kv_connector": "MultiConnector"}, ("MultiConnector",), None, False),
        (multi(NIXL_60, STORE_CHILD, 3), ("NixlConnector", "MooncakeStoreConnector"), 60, True),
        (multi(STORE_CHILD), ("MooncakeStoreConnector",), None, False),
        ({**multi(STORE_CHILD), "kv_connector": "Other"}, ("Other",), None, False),
    ],
)
def test_a39_a_config_of_the_users_is_read_as_vllm_reads_it(
    config: JsonDict, names: tuple[str, ...], lease: int | None, lease_named: bool
) -> None:
    reading = read_transfer_config(config)
    assert (reading.connectors, reading.lease, reading.lease_named) == (names, lease, lease_named)
    assert reading.joins_pool is ("MooncakeStoreConnector" in names)
