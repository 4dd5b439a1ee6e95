"""The whole plan: pure, complete, and every process told the right things."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest

from connectors.types import JsonDict
from deploy.unit import HttpProbe, ListenProbe, MetricProbe
from orchestrator.plan.types import plan_from_json, plan_to_json
from tests.unit.orchestrator.samples import (
    MOONCAKE,
    argument,
    colocated_data,
    facts_of,
    file_text,
    node,
    pd_data,
    plan_of,
    transfer,
    unit,
)


def shuffled(value: Any, seed: int) -> Any:
    if not isinstance(value, dict):
        return value
    items = [(key, shuffled(inner, seed)) for key, inner in value.items()]
    random.Random(seed).shuffle(items)
    return dict(items)


def rich_data() -> JsonDict:
    return pd_data(
        engine={"max_num_seqs": 8, "dtype": "float32", "hf_overrides": {"b": 1, "a": 2}},
        env={"B": "1", "A": "2", "UCX_TLS": "tcp"},
        roles={"prefill": {"replicas": 2}, "decode": {"engine": {"seed": 3}, "env": {"Z": "1", "C": "1"}}},
        pool={"master_flags": {"v": 1, "eviction_ratio": 0.1}},
        monitoring={"enabled": True},
    )


def test_the_same_input_gives_the_same_bytes() -> None:
    first = plan_to_json(plan_of(rich_data()))
    assert plan_to_json(plan_of(rich_data())) == first
    for seed in range(3):
        assert plan_to_json(plan_of(shuffled(rich_data(), seed))) == first


@pytest.mark.parametrize("data", [rich_data(), colocated_data(), pd_data(pool={"master": "10.9.9.9:50051"})])
def test_a_plan_survives_json(data: JsonDict) -> None:
    plan = plan_of(data)
    assert plan_from_json(plan_to_json(plan)) == plan


def test_what_starts_when_and_what_says_ready() -> None:
    plan = plan_of(pd_data(monitoring={"enabled": True}))
    stages = {unit.name: (unit.start_stage, type(unit.probe)) for unit in plan.units}
    assert stages == {
        "mooncake-master": (0, ListenProbe),
        "storage-prefill-0": (1, MetricProbe),
        "prefill-0": (2, HttpProbe),
        "decode-0": (2, HttpProbe),
        "router": (3, HttpProbe),
        "prometheus": (3, HttpProbe),
    }


class TestAddresses:
    def test_a30_two_nodes_tell_each_other_reachable_addresses(self) -> None:
        plan = plan_of(pd_data(monitoring={"enabled": True}), facts_of(node(0), node(1)))
        assert plan.errors == ()
        text = plan_to_json(plan)
        assert "127.0." not in text
        assert "localhost" not in text
        prefill, decode = unit(plan, "prefill-0"), unit(plan, "decode-0")
        for planned, address in ((prefill, "10.0.0.1"), (decode, "10.0.0.2")):
            for variable in ("VLLM_HOST_IP", "VLLM_NIXL_SIDE_CHANNEL_HOST", "MOONCAKE_REQUESTER_LOCAL_HOSTNAME"):
                assert planned.env[variable] == address
            assert argument(plan, planned.name, "--host") == "0.0.0.0"
        assert plan.pool is not None
        assert plan.pool.master_address.startswith("10.0.0.1:")

    def test_a30_one_node_stays_on_loopback(self) -> None:
        plan = plan_of(pd_data())
        assert argument(plan, "prefill-0", "--host") == "127.0.0.1"
        assert plan.router.url == "http://127.0.0.1:8000"
        assert "0.0.0.0" not in plan_to_json(plan)


def test_a34_paths_with_spaces_stay_whole() -> None:
    path = "/models/my run/a b"
    facts = facts_of(job_dir="/jobs/my run/a b")
    plan = plan_of(
        pd_data(
            engine={"download_dir": path},
            kv_offload={**MOONCAKE, "disk": {"path": "/nvme/k v"}},
            monitoring={"enabled": True},
        ),
        facts,
    )
    assert argument(plan, "prefill-0", "--download-dir") == path
    assert unit(plan, "router").argv[-1] == "/jobs/my run/a b/router.json"
    assert unit(plan, "prefill-0").env["MOONCAKE_CONFIG_PATH"] == "/jobs/my run/a b/mooncake.json"
    assert unit(plan, "storage-prefill-0").env["MOONCAKE_OFFLOAD_FSDIR"] == "/nvme/k v"
    assert any("/jobs/my run/a b/monitoring/prometheus.yml" in part for part in unit(plan, "prometheus").argv)
    written = json.loads(file_text(plan, "inference-prefill.json"))["arguments"]["kv_transfer_config"]
    assert transfer(plan, "prefill-0") == written
