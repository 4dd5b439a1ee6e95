"""No address that others cannot reach, no port that others have."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from connectors.types import JsonDict
from deploy.unit import HttpProbe
from tests.unit.orchestrator.samples import (
    assert_error,
    facts_of,
    node,
    pd_data,
    plan_of,
    unit,
    warning_at,
)


def roles(**decode: Any) -> JsonDict:
    return {"roles": {"decode": decode}}


@pytest.mark.parametrize("address", ["127.0.0.1", "127.3.0.1", "localhost", "0.0.0.0", "::1"])
def test_a30_a_loopback_node_in_a_job_of_two_nodes_is_refused(address: str) -> None:
    facts = facts_of(node(0, address=address), node(1))
    assert_error(pd_data(), "nodes", f"n0 is known as {address}", "addresses that the other nodes reach", facts=facts)


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"env": {"VLLM_HOST_IP": "127.0.0.1"}}, "env.VLLM_HOST_IP"),
        (roles(env={"VLLM_NIXL_SIDE_CHANNEL_HOST": "localhost"}), "roles.decode.env.VLLM_NIXL_SIDE_CHANNEL_HOST"),
        ({"env": {"MOONCAKE_REQUESTER_LOCAL_HOSTNAME": "0.0.0.0"}}, "env.MOONCAKE_REQUESTER_LOCAL_HOSTNAME"),
        ({"engine": {"data_parallel_address": "127.0.0.1"}}, "engine.data_parallel_address"),
        ({"pool": {"master": "localhost:50051"}}, "pool.master"),
        ({"router": {"host": "127.0.0.1"}}, "router.host"),
    ],
)
def test_a30_a_loopback_address_is_not_told_to_another_node(changes: dict[str, Any], field: str) -> None:
    assert_error(pd_data(**changes), field, "in a job of 2 nodes", facts=facts_of(node(0), node(1)))
    assert plan_of(pd_data(**changes)).errors == ()


def test_a30_a_bind_address_may_be_every_interface() -> None:
    plan = plan_of(pd_data(router={"host": "0.0.0.0"}), facts_of(node(0), node(1)))
    assert plan.errors == ()
    assert plan.router.url == "http://10.0.0.1:8000"


@pytest.mark.parametrize(
    ("host", "url"),
    [
        ("::1", "http://[::1]:8000"),
        ("::", "http://[::1]:8000"),
        ("0.0.0.0", "http://127.0.0.1:8000"),
        ("head.example", "http://head.example:8000"),
    ],
)
def test_the_routers_address_is_a_url(host: str, url: str) -> None:
    plan = plan_of(pd_data(router={"host": host}))
    assert plan.errors == ()
    assert plan.router.url == url
    assert unit(plan, "router").probe == HttpProbe(url=f"{url}/health")


def test_every_ipv6_interface_is_no_answer_to_nodes_known_by_ipv4() -> None:
    data = pd_data(router={"host": "::"})
    assert_error(data, "router.host", "IPv6 alone", "set 0.0.0.0", facts=facts_of(node(0), node(1)))


def test_a29_planned_ports_that_outgoing_connections_may_take() -> None:
    low = replace(node(address="127.0.0.1"), outgoing_ports_from=9000)
    plan = plan_of(pd_data(router={"port": 9100}), facts_of(low))
    found = warning_at(plan, "ports.base")
    assert "n0 gives ports from 9000 to outgoing connections" in found.problem
    assert "ip_local_port_range='32768 60999'" in found.mend
    assert "reach 9100" in warning_at(plan, "router.port").problem
    assert plan.errors == ()


def test_a29_a_port_of_another_job_is_refused() -> None:
    facts = facts_of(reserved_ports=frozenset({8000}))
    assert_error(pd_data(), "router.port", "8000 is planned by another job", "choose another", facts=facts)
