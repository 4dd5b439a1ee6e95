"""What each role gets once inheritance is worked out."""

from __future__ import annotations

from typing import Any

import pytest

from orchestrator.plan.resolve import Resolved, resolve_roles
from orchestrator.spec.offload import MooncakeOffload, NativeOffload, NoOffload
from tests.unit.orchestrator.samples import GIB, MODEL, pd_data, spec_of

JOB_BLOCK = {"type": "mooncake", "cpu": {"num_bytes": "1GiB"}, "disk": {"path": "/nvme/kv"}, "lease_ttl": "30s"}


def resolve(job: object, prefill: object, **changes: Any) -> Resolved:
    data = {
        "name": "demo",
        "model": {"path": MODEL},
        "kv_offload": job,
        "roles": {"prefill": {"kv_offload": prefill}, "decode": {"kv_offload": "none"}},
        **changes,
    }
    return resolve_roles(spec_of(data))


def mooncake(num_bytes: int, **rest: Any) -> MooncakeOffload:
    return MooncakeOffload.model_validate({"cpu": {"num_bytes": num_bytes}, **rest})


DISK = {"path": "/nvme/kv"}


@pytest.mark.parametrize(
    ("job", "own", "result"),
    [
        pytest.param(JOB_BLOCK, "inherit", mooncake(GIB, disk=DISK, lease_ttl=30), id="inherit"),
        pytest.param("none", "inherit", NoOffload(), id="inherit nothing"),
        pytest.param(JOB_BLOCK, {}, mooncake(GIB, disk=DISK, lease_ttl=30), id="empty block inherits"),
        pytest.param("none", {}, NoOffload(), id="empty block, no job block"),
        pytest.param(
            JOB_BLOCK, {"cpu": {"num_bytes": 0}}, mooncake(0, disk=DISK, lease_ttl=30), id="zero capacity, partial"
        ),
        pytest.param(
            JOB_BLOCK,
            {"save_decode_cache": False, "disk": {"num_bytes": "1TiB"}},
            mooncake(GIB, disk={**DISK, "num_bytes": 2**40}, lease_ttl=30, save_decode_cache=False),
            id="partial, two levels",
        ),
        pytest.param(JOB_BLOCK, "none", NoOffload(), id="none"),
        pytest.param(JOB_BLOCK, {"type": "none"}, NoOffload(), id="none as a block"),
        pytest.param(
            JOB_BLOCK,
            {"type": "native"},
            NativeOffload.model_validate({"cpu": {"num_bytes": GIB}, "disk": DISK}),
            id="native inherits size and disk path from mooncake",
        ),
        pytest.param(
            JOB_BLOCK,
            {"type": "native", "cpu": {"num_bytes": "2GiB"}},
            NativeOffload.model_validate({"cpu": {"num_bytes": 2 * GIB}, "disk": DISK}),
            id="native with a size of its own",
        ),
        pytest.param("none", {"type": "mooncake", "cpu": {"num_bytes": 5}}, mooncake(5), id="full block, no job block"),
        pytest.param(
            {"type": "mooncake"}, {"cpu": {"num_bytes": 5}}, mooncake(5), id="job block completed by the role"
        ),
    ],
)
def test_offload_of_a_role(job: object, own: object, result: object) -> None:
    resolved = resolve(job, own)
    assert resolved.complaints == ()
    assert [role.offload for role in resolved.roles] == [result, NoOffload()]


@pytest.mark.parametrize(
    ("job", "own", "complaint"),
    [
        pytest.param(
            JOB_BLOCK,
            {"type": "native", "cpu": {"num_bytes": 0}},
            "roles.prefill.kv_offload.cpu.num_bytes: Input should be greater than 0 (was 0); "
            'give a positive size, or kv_offload = "none"',
            id="native of size 0",
        ),
        pytest.param(
            {"type": "mooncake", "cpu": {"num_bytes": 0}},
            {"type": "native"},
            "roles.prefill.kv_offload.cpu.num_bytes: Input should be greater than 0 (was 0); "
            'give a positive size, or kv_offload = "none"',
            id="native inherits size 0",
        ),
        pytest.param(
            "none",
            {"cpu": {"num_bytes": 1}},
            'roles.prefill.kv_offload: changes a block that the job does not have; set type = "mooncake" or "native"',
            id="partial of nothing",
        ),
        pytest.param(
            JOB_BLOCK,
            {"type": "none", "cpu": {"num_bytes": 1}},
            'roles.prefill.kv_offload: is none, with other keys; set type = "mooncake" or "native"',
            id="none with more",
        ),
        pytest.param(
            {"cpu": {"num_bytes": 1}},
            "inherit",
            'kv_offload: has no type; set type = "mooncake", "native" or "none"',
            id="no type",
        ),
        pytest.param(
            {"type": "lmcache"},
            "inherit",
            'kv_offload: has type \'lmcache\'; set type = "mooncake", "native" or "none"',
            id="unknown type",
        ),
        pytest.param(
            {**JOB_BLOCK, "leese_ttl": 1},
            {"cpu": {"num_bytes": 0}},
            "kv_offload.leese_ttl: is no known key; did you mean 'lease_ttl'?",
            id="unknown key of the job's block",
        ),
        pytest.param(
            JOB_BLOCK,
            {"cpu": {"num_byte": 0}},
            "roles.prefill.kv_offload.cpu.num_byte: is no known key; did you mean 'num_bytes'?",
            id="unknown key of the role's block",
        ),
        pytest.param(
            {"type": "mooncake"},
            "inherit",
            "kv_offload.cpu: is missing; add it with num_bytes",
            id="disk only or nothing at all",
        ),
        pytest.param(
            {"type": "mooncake", "cpu": "1GiB"},
            "inherit",
            'kv_offload.cpu: is no table (was "1GiB"); write it as a table with num_bytes',
            id="a size where its table stands",
        ),
        pytest.param(
            {**JOB_BLOCK, "disk": {"path": "kv"}},
            "inherit",
            'kv_offload.disk.path: does not fit (was "kv"); Absolute folder on every node that lends capacity; '
            "one per master.",
            id="relative disk path",
        ),
    ],
)
def test_offload_refused(job: object, own: object, complaint: str) -> None:
    resolved = resolve(job, own)
    assert [str(found) for found in resolved.complaints] == [complaint]
    assert [role.role for role in resolved.roles] == ["decode"]


def test_engine_arguments_and_environment_of_a_role_win() -> None:
    data = pd_data(
        engine={"max_num_seqs": 8, "dtype": "float32"},
        env={"A": "1", "B": "1"},
        roles={"decode": {"engine": {"max_num_seqs": 512}, "env": {"B": "2"}, "replicas": 3}},
    )
    prefill, decode = resolve_roles(spec_of(data)).roles
    assert (prefill.engine, prefill.env) == ({"dtype": "float32", "max_num_seqs": 8}, {"A": "1", "B": "1"})
    assert (decode.engine, decode.env) == ({"dtype": "float32", "max_num_seqs": 512}, {"A": "1", "B": "2"})
    assert (prefill.replicas, decode.replicas) == (1, 3)


def test_an_explicit_transfer_config_is_kept_apart() -> None:
    config = {"kv_connector": "NixlConnector", "kv_role": "kv_both"}
    data = pd_data(roles={"decode": {"engine": {"kv_transfer_config": config}}})
    prefill, decode = resolve_roles(spec_of(data)).roles
    assert (prefill.transfer_override, decode.transfer_override) == (None, config)
    assert "kv_transfer_config" not in decode.engine


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        (
            {"engine": {"tensor_parallel_size": 0}},
            "engine.tensor_parallel_size: is 0, not a positive integer; give a whole number, 1 or more",
        ),
        (
            {"roles": {"decode": {"engine": {"data_parallel_size": "2"}}}},
            "roles.decode.engine.data_parallel_size: is '2', not a positive integer; give a whole number, 1 or more",
        ),
        (
            {"engine": {"kv_transfer_config": "{}"}},
            "engine.kv_transfer_config: is str, not a table; write it as a table; Headrace makes the JSON",
        ),
    ],
)
def test_engine_arguments_refused(changes: dict[str, Any], complaint: str) -> None:
    resolved = resolve_roles(spec_of(pd_data(**changes)))
    assert [str(found) for found in resolved.complaints] == [complaint]


@pytest.mark.parametrize("change", [{"replicas": 10**9}, {"replicas": 1, "engine": {"tensor_parallel_size": 10**9}}])
def test_more_ranks_than_any_fleet_has_are_refused_before_they_are_listed(change: dict[str, Any]) -> None:
    data = pd_data()
    data["roles"]["decode"] |= change
    (complaint,) = resolve_roles(spec_of(data)).complaints
    assert complaint.field == "roles.decode.replicas"
    assert "4096" in complaint.problem
