"""Rules on addresses and ports."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from connectors.mooncake import EPHEMERAL_PORTS_FROM
from deploy.unit import LaunchUnit
from orchestrator.plan.facts import ClusterFacts
from orchestrator.plan.resolve import engine_field, env_field
from orchestrator.plan.rules_base import CheckInput, error, is_local, warning
from orchestrator.plan.types import Finding

ADVERTISED_VARIABLES = ("VLLM_HOST_IP", "VLLM_NIXL_SIDE_CHANNEL_HOST", "MOONCAKE_REQUESTER_LOCAL_HOSTNAME")
ADVERTISED_ARGUMENTS = ("data_parallel_address", "master_addr")
OWN_ADDRESS = "drop it; the node's own address is used"


def advertised_addresses(given: CheckInput) -> Iterator[Finding]:
    """[A30] No loopback address is told to another node."""
    spec, count = given.spec, len(given.facts.nodes)
    if count < 2:
        return
    for node in given.facts.nodes:
        if is_local(node.address):
            problem = f"{node.name} is known as {node.address} in a job of {count} nodes"
            yield error("nodes", problem, "give addresses that the other nodes reach")
    named = [
        *(
            (env_field(spec, role.role, name), role.env.get(name))
            for role in given.roles
            for name in ADVERTISED_VARIABLES
        ),
        *(
            (engine_field(spec, role.role, name), role.engine.get(name))
            for role in given.roles
            for name in ADVERTISED_ARGUMENTS
        ),
    ]
    for field, value in named:
        if is_local(value):
            yield error(field, f"is {value} in a job of {count} nodes", OWN_ADDRESS)
    if spec.pool.master is not None and is_local(spec.pool.master.rpartition(":")[0]):
        problem = f"is {spec.pool.master} in a job of {count} nodes"
        yield error("pool.master", problem, "give an address that every node reaches")
    if spec.router.host not in (None, "0.0.0.0", "::") and is_local(spec.router.host):
        yield error("router.host", f"is {spec.router.host} in a job of {count} nodes", "drop it, or set 0.0.0.0")


def router_host(given: CheckInput) -> Iterator[Finding]:
    """A socket on every IPv6 interface takes no IPv4 connection, and the other nodes know the head by its address."""
    head, count = given.facts.nodes[0], len(given.facts.nodes)
    if given.spec.router.host == "::" and count > 1 and ":" not in head.address:
        problem = f"is '::', which is IPv6 alone, and {head.name} is known as {head.address}"
        yield error("router.host", problem, "drop it, or set 0.0.0.0")


def router_port(given: CheckInput) -> Iterator[Finding]:
    """[A29] Ports that the user fixed must not be another job's."""
    port = given.spec.router.port
    if port in given.facts.reserved_ports:
        yield error("router.port", f"{port} is planned by another job here", "choose another port")


def outgoing_port_findings(facts: ClusterFacts, units: Sequence[LaunchUnit]) -> Iterator[Finding]:
    """[A29] A port that the kernel gives to outgoing connections may be taken at any moment until it is bound."""
    for node in facts.nodes:
        low = node.outgoing_ports_from
        last: dict[str, int] = {}
        for unit in units:
            if unit.node == node.name:
                for setting, port in _last_ports(unit):
                    last[setting] = max(last.get(setting, 0), port)
        for setting, port in sorted(last.items()):
            if port >= low:
                problem = f"planned ports reach {port}; {node.name} gives ports from {low} to outgoing connections"
                mend = f"set it lower, or sysctl -w net.ipv4.ip_local_port_range='{EPHEMERAL_PORTS_FROM} 60999' there"
                yield warning(setting, problem, mend)


def _last_ports(unit: LaunchUnit) -> Iterator[tuple[str, int]]:
    yield from ((port.setting, port.port) for port in unit.ports)
    yield from ((ports.setting, ports.first + ports.count - 1) for ports in unit.port_ranges)


RULES = (advertised_addresses, router_host, router_port)
