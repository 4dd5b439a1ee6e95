"""Every port of every process, decided before anything starts."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from orchestrator.errors import PlanRefused
from orchestrator.plan.types import JobPlan
from orchestrator.store.jobs import planned_ports
from tests.unit.orchestrator.samples import (
    facts_of,
    node,
    pd_data,
    plan_of,
    unit,
)


class TestPorts:
    def listening(self, plan: JobPlan, node_name: str) -> list[int]:
        """All ports of a node, the ranges that store clients pick from included."""
        ports: list[int] = []
        for planned in plan.units:
            if planned.node != node_name:
                continue
            ports += [port.port for port in planned.ports]
            for low, high in (
                ("MC_STORE_CLIENT_MIN_PORT", "MC_STORE_CLIENT_MAX_PORT"),
                ("MC_MIN_RPC_PORT", "MC_MAX_RPC_PORT"),
            ):
                if low in planned.env:
                    ports += range(int(planned.env[low]), int(planned.env[high]) + 1)
        return ports

    def test_a29_every_port_is_distinct_and_below_the_ephemeral_range(self) -> None:
        data = pd_data(
            roles={"prefill": {"replicas": 3}, "decode": {"replicas": 3, "kv_offload": {"cpu": {"num_bytes": 1}}}},
            monitoring={"enabled": True},
        )
        plan = plan_of(data, facts_of(node(0), node(1)))
        for name in ("n0", "n1"):
            ports = self.listening(plan, name)
            assert len(ports) == len(set(ports)) > 10
            assert max(ports) < 32768
        assert 9003 not in self.listening(plan, "n0")

    def test_a29_two_jobs_share_no_port(self) -> None:
        reserved: set[int] = set()
        for index in range(6):
            data = pd_data(name=f"job-{index}", router={"port": 8000 + index}, monitoring={"enabled": True})
            ports = self.listening(plan_of(data, facts_of(reserved_ports=frozenset(reserved))), "n0")
            assert reserved.isdisjoint(ports)
            reserved |= set(ports)

    def test_a29_two_jobs_with_one_base_share_no_port(self) -> None:
        first = planned_ports(plan_of(pd_data(ports={"base": 12_000}), facts_of()))
        data = pd_data(name="other", router={"port": 8001}, ports={"base": 12_000})
        assert first.isdisjoint(planned_ports(plan_of(data, facts_of(reserved_ports=first))))

    def test_a29_jobs_of_one_name_in_two_state_folders_share_no_port(self) -> None:
        mine = plan_of(pd_data(), facts_of())
        assert plan_of(pd_data(), facts_of()).ports == mine.ports
        theirs = plan_of(pd_data(), facts_of(job_dir="/home/other/jobs/demo"))
        another_user = plan_of(pd_data(), replace(facts_of(), socket_dir=Path("/tmp/headrace-1001-0")))
        for plan in (theirs, another_user):
            assert set(self.listening(plan, "n0")) & set(self.listening(mine, "n0")) == {8000}

    def test_a29_the_ports_that_store_clients_pick_from_are_part_of_the_plan(self) -> None:
        plan = plan_of(pd_data())
        for name in ("storage-prefill-0", "prefill-0"):
            names, transfers = unit(plan, name).port_ranges
            env = unit(plan, name).env
            assert (names.first, names.count, names.needed) == (int(env["MC_STORE_CLIENT_MIN_PORT"]), 2, 1)
            assert (transfers.first, transfers.count, transfers.needed) == (int(env["MC_MIN_RPC_PORT"]), 4, 2)
        assert unit(plan, "router").port_ranges == ()

    def test_a29_each_port_names_the_field_that_moves_it(self) -> None:
        plan = plan_of(pd_data(monitoring={"enabled": True}))
        settings = {(planned.name, port.name): port.setting for planned in plan.units for port in planned.ports}
        assert settings.pop(("router", "http")) == "router.port"
        assert set(settings.values()) == {"ports.base"}

    def test_a29_a_job_keeps_clear_of_others_in_its_own_block_too(self) -> None:
        data = pd_data(ports={"base": 20000}, router={"port": 20003})
        facts = facts_of(reserved_ports=frozenset({20000, 20007}))
        ports = self.listening(plan_of(data, facts), "n0")
        assert ports.count(20003) == 1
        assert {20000, 20007}.isdisjoint(ports)

    def test_ports_run_out_by_name(self) -> None:
        with pytest.raises(PlanRefused, match=r"ports.base: no \d+ ports left between 32760 and 32768 on n0"):
            plan_of(pd_data(ports={"base": 32760}))
        full = frozenset(range(10240, 32768))
        with pytest.raises(PlanRefused, match="every block of ports is planned by another job"):
            plan_of(pd_data(), facts_of(reserved_ports=full))
