"""Rules on the pool: one master has one lease, one disk path, and somebody who lends."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from itertools import pairwise

from connectors.store_argv import FORBIDDEN_WITH_DISK_TIER, OWNED_MASTER_FLAGS, flag_name
from orchestrator.plan.rules_base import CheckInput, error, offload_field, warning
from orchestrator.plan.types import Finding

SHORTEST_LEASE_S = 1.0
LONG_LEASE_S = 600.0


def one_disk_path(given: CheckInput) -> Iterator[Finding]:
    with_disk = [(role, role.offload.disk) for role in given.pooled if role.offload.disk is not None]
    for (first, left), (second, right) in pairwise(with_disk):
        if left.path != right.path:
            problem = f"{second.name} has {right.path}, {first.name} has {left.path}"
            mend = "one master has one disk path; give both roles the same"
            yield error(offload_field(given, second.config, "disk", "path"), problem, mend)
    for role in given.pooled:
        if role.lends and with_disk and role.offload.disk is None:
            other, disk = with_disk[0]
            problem = f"{role.name} lends capacity without a disk, {other.name} has {disk.path}"
            mend = "give every role that lends capacity the same disk path"
            yield error(f"roles.{role.name}.kv_offload.disk", problem, mend)
    for role, _ in with_disk:
        field = offload_field(given, role.config, "disk")
        if not role.lends and field.startswith("roles."):
            yield warning(field, "has no effect on a role that lends no DRAM", "set cpu.num_bytes above 0 or drop disk")


def one_client_per_disk(given: CheckInput) -> Iterator[Finding]:
    """Two storage clients of one node would keep their files in one folder."""
    lenders = [role for role in given.pooled if role.lends and role.offload.disk is not None]
    places = {(engine.node.name, engine.role.role) for engine in given.placed}
    for first, second in pairwise(lenders):
        shared = sorted(node for node, role in places if role == first.name and (node, second.name) in places)
        if shared and second.offload.disk is not None:
            problem = f"{first.name} and {second.name} both lend on {shared[0]}, with {second.offload.disk.path}"
            mend = f"set roles.{second.name}.kv_offload.cpu.num_bytes = 0, or keep the roles on nodes of their own"
            yield error(offload_field(given, second.config, "disk", "path"), problem, mend)


def one_lease(given: CheckInput) -> Iterator[Finding]:
    """[A22] One lease per master, in a sensible range."""
    pool = given.spec.pool
    values = [("pool.lease_ttl", pool.lease_ttl)] if "lease_ttl" in pool.model_fields_set else []
    for role in given.pooled:
        if role.offload.lease_ttl is not None:
            values.append((offload_field(given, role.config, "lease_ttl"), role.offload.lease_ttl))
    for (first, left), (second, right) in pairwise(values):
        if left != right:
            yield error(second, f"is {right:g} s, {first} is {left:g} s", "one master has one lease; give one value")
    for field, value in values or [("pool.lease_ttl", pool.lease_ttl)]:
        if value < SHORTEST_LEASE_S:
            mend = "a block must outlive the read that follows its look-up; use 1s or more"
            yield error(field, f"is {value * 1000:g} ms", mend)
        elif value > LONG_LEASE_S:
            yield warning(field, f"is {value:g} s; leased blocks cannot be evicted", "use seconds to minutes")


def master_flags(given: CheckInput) -> Iterator[Finding]:
    """[A29] What the plan decides cannot be set a second time, and Mooncake's guides forbid some pairs."""
    with_disk = any(role.offload.disk is not None for role in given.pooled)
    for name in sorted(given.spec.pool.master_flags):
        field = f"pool.master_flags.{name}"
        if flag_name(name) in OWNED_MASTER_FLAGS:
            yield error(field, "is decided by the plan", OWNED_MASTER_FLAGS[flag_name(name)])
        if with_disk and flag_name(name) in FORBIDDEN_WITH_DISK_TIER:
            why = FORBIDDEN_WITH_DISK_TIER[flag_name(name)]
            yield error(field, "is set together with kv_offload.disk", f"{why}; drop one")


def joined_master(given: CheckInput) -> Iterator[Finding]:
    master = given.spec.pool.master
    if master is None:
        return
    for name in ("lease_ttl", "master_flags"):
        if name in given.spec.pool.model_fields_set:
            yield warning(f"pool.{name}", f"has no effect on the running master {master}", "set it there")


def somebody_lends(given: CheckInput) -> Iterator[Finding]:
    trainer = given.spec.trainer_storage
    if trainer is not None and not given.pooled:
        yield error("trainer_storage", "lends memory to a pool that no role joins", 'set kv_offload.type = "mooncake"')
    lends = trainer is not None or any(role.lends for role in given.pooled)
    if given.pooled and not lends and given.spec.pool.master is None:
        names = ", ".join(role.name for role in given.pooled)
        problem = f"is 0 on every role ({names}), so the pool would hold nothing"
        yield error("kv_offload.cpu.num_bytes", problem, "give one role a size above 0")


def trainer_nodes(given: CheckInput) -> Iterator[Finding]:
    if given.spec.trainer_storage is None:
        return
    known = [node.name for node in given.facts.nodes]
    for name, count in Counter(given.spec.trainer_storage.nodes).items():
        if name not in known:
            mend = f"name nodes of the job: {', '.join(known)}"
            yield error("trainer_storage.nodes", f"{name!r} is no node of this job", mend)
        if count > 1:
            yield error("trainer_storage.nodes", f"{name!r} is named {count} times", "name each node once")


RULES = (
    one_disk_path,
    one_client_per_disk,
    one_lease,
    master_flags,
    joined_master,
    somebody_lends,
    trainer_nodes,
)
