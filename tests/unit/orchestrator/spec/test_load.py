"""Job files as text: both spellings, overrides, and every mistake named."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from orchestrator.errors import SpecError
from orchestrator.spec.job import JobSpec
from orchestrator.spec.load import job_from_data, load_job_file, parse_job_text
from tests.unit.orchestrator.samples import pd_data

TOML = """
name = "swe-rollouts"
[model]
path = "/models/glm"
[engine]
tensor_parallel_size = 8
kv_cache_dtype = "fp8"
hf_overrides = { rope_scaling = { factor = 4.0 } }
[kv_offload]
type = "mooncake"
cpu.num_bytes = "1TiB"
disk.path = "/nvme/kv"
[roles.prefill]
replicas = 4
[roles.decode]
replicas = 8
kv_offload.cpu.num_bytes = 0
engine.max_num_seqs = 512
env."MY.VARIABLE" = "a.b"
[pool]
protocol = "rdma"
lease_ttl = "1m"
"""

JSON = {
    "name": "swe-rollouts",
    "model.path": "/models/glm",
    "engine": {
        "tensor_parallel_size": 8,
        "kv_cache_dtype": "fp8",
        "hf_overrides.rope_scaling": {"factor": 4.0},
    },
    "kv_offload": {"type": "mooncake", "cpu.num_bytes": "1TiB", "disk.path": "/nvme/kv"},
    "roles": {
        "prefill.replicas": 4,
        "decode": {
            "replicas": 8,
            "kv_offload.cpu.num_bytes": 0,
            "engine.max_num_seqs": 512,
            "env.MY.VARIABLE": "a.b",
        },
    },
    "pool": {"protocol": "rdma", "lease_ttl": 60},
}


def load(data: dict[str, Any]) -> JobSpec:
    return job_from_data(data, source="job.json")


def complaints(data: dict[str, Any]) -> dict[str, str]:
    with pytest.raises(SpecError) as caught:
        load(data)
    return {complaint.field: f"{complaint.problem}; {complaint.mend}" for complaint in caught.value.complaints}


def test_toml_and_json_say_the_same(tmp_path: Path) -> None:
    (tmp_path / "job.toml").write_text(TOML)
    (tmp_path / "job.json").write_text(json.dumps(JSON))
    from_toml, from_json = load_job_file(tmp_path / "job.toml"), load_job_file(tmp_path / "job.json")
    assert from_toml == from_json
    assert from_toml.roles.decode is not None
    assert from_toml.roles.decode.kv_offload == {"cpu": {"num_bytes": 0}}
    assert from_toml.roles.decode.env == {"MY.VARIABLE": "a.b"}
    assert from_toml.engine["hf_overrides"] == {"rope_scaling": {"factor": 4.0}}


def test_values_passed_through_to_vllm_keep_their_dots() -> None:
    spec = load(pd_data(engine={"limits": {"image.max": 2}}, pool={"master_flags": {"a.b": 1}}))
    assert spec.engine == {"limits": {"image.max": 2}}
    assert spec.pool.master_flags == {"a.b": 1}


@pytest.mark.parametrize(
    ("path", "key", "near"),
    [
        ((), "rolse", "roles"),
        (("model",), "pth", "path"),
        (("roles",), "prefil", "prefill"),
        (("roles", "decode"), "replica", "replicas"),
        (("pool",), "lease", "lease_ttl"),
        (("router",), "prot", "port"),
        (("launch",), "backand", "backend"),
        (("handoff",), "leases", "lease"),
        (("trainer_storage",), "num_byte", "num_bytes"),
        (("monitoring",), "enable", "enabled"),
        (("ports",), "bases", "base"),
        (("checks",), "offload_prob", "offload_probe"),
        (("weights",), "transports", "transport"),
    ],
)
def test_an_unknown_key_is_named_with_the_nearest_known_one(path: tuple[str, ...], key: str, near: str) -> None:
    inner: dict[str, Any] = {key: 1}
    for part in reversed(path):
        inner = {part: inner}
    if path == ("trainer_storage",):
        inner["trainer_storage"]["num_bytes"] = 1
    assert complaints(pd_data(**inner)) == {".".join([*path, key]): f"is no known key; did you mean {near!r}?"}


def test_an_unknown_key_near_nothing_lists_the_known_ones() -> None:
    assert complaints(pd_data(model={"zzz": 1})) == {
        "model.zzz": "is no known key; known keys: path, revision, served_names"
    }


@pytest.mark.parametrize(
    ("written", "seconds"),
    [
        (90, 90.0),
        (1.5, 1.5),
        ("90s", 90.0),
        ("1.5m", 90.0),
        ("500ms", 0.5),
        ("2h", 7200.0),
        ("1d", 86400.0),
        (" 3 s ", 3),
    ],
)
def test_durations(written: object, seconds: float) -> None:
    assert load(pd_data(pool={"lease_ttl": written})).pool.lease_ttl == seconds


@pytest.mark.parametrize("written", ["90", "1 week", "m", "-5s", 0, -1, "1e3s", None, []])
def test_what_is_no_duration_is_refused(written: object) -> None:
    assert list(complaints(pd_data(pool={"lease_ttl": written}))) == ["pool.lease_ttl"]


@pytest.mark.parametrize(
    ("written", "num_bytes"),
    [(1024, 1024), ("10GB", 10**10), ("10GiB", 10 * 2**30), ("1.5KiB", 1536), ("1TiB", 2**40), ("64 MiB", 64 * 2**20)],
)
def test_sizes(written: object, num_bytes: int) -> None:
    assert load(pd_data(pool={"local_buffer_bytes": written})).pool.local_buffer_bytes == num_bytes


@pytest.mark.parametrize("written", ["ten", "1 zB", "-1GB", 0, -1, "", []])
def test_what_is_no_size_is_refused(written: object) -> None:
    assert list(complaints(pd_data(pool={"local_buffer_bytes": written}))) == ["pool.local_buffer_bytes"]


@pytest.mark.parametrize(
    ("changes", "field", "says"),
    [
        ({"name": "Not_Good"}, "name", 'does not fit (was "Not_Good"); Lower-case letters, digits and dashes'),
        ({"kv_offload": "mooncake"}, "kv_offload", "must be a table or 'none' (was \"mooncake\")"),
        (
            {"roles": {"decode": {"kv_offload": "of"}}},
            "roles.decode.kv_offload",
            "must be a table or 'inherit' or 'none'",
        ),
        ({"roles": {"decode": {"replicas": 0}}}, "roles.decode.replicas", "greater than or equal to 1 (was 0)"),
        ({"env": {"X": 1}}, "env.X", "write it in quotes"),
        ({"model": "x"}, "model", 'is no table (was "x"); write it as a table with path'),
        ({"pool": {"master": "head"}}, "pool.master", 'must be host:port, with a port from 1 to 65535 (was "head")'),
        ({"pool": {"master": "head:70000"}}, "pool.master", "must be host:port"),
        ({"pool": {"master_flags": {"v": [1]}}}, "pool.master_flags.v", "must be a string, a number or a boolean"),
        ({"router": {"policy": "random"}}, "router.policy", "'consistent_hash' or 'power_of_two' (was \"random\")"),
        ({"router": {"port": 70000}}, "router.port", "less than or equal to 65535"),
        ({"handoff": {"lease": "3s"}}, "handoff.lease", "greater than or equal to 6"),
        ({"router": {"host": "[::1]"}}, "router.host", "must be an IP address or a host name"),
        ({"router": {"host": "http://x"}}, "router.host", "without scheme, port or brackets"),
        ({"router": {"host": "fe80::1%eth0"}}, "router.host", "must be an IP address"),
        ({"router": {"host": "127.0.0.999"}}, "router.host", "must be an IP address"),
        ({"monitoring": {"retention": "a week"}}, "monitoring.retention", "a number with m, h, d, w or y"),
        ({"monitoring": {"scrape_interval": "200ms"}}, "monitoring.scrape_interval", "greater than or equal to 1"),
        ({"handoff": {"transport": "nvlink"}}, "handoff.transport", "'auto', 'tcp' or 'rdma'"),
        ({"ports": {"base": 40000}}, "ports.base", "less than 32768"),
        ({"launch": {"python": "python3"}}, "launch.python", "Absolute path of the interpreter"),
    ],
)
def test_a_wrong_value_is_shown_with_what_is_right(changes: dict[str, Any], field: str, says: str) -> None:
    found = complaints(pd_data(**changes))
    assert list(found) == [field]
    assert says in found[field]


def test_all_mistakes_are_told_at_once() -> None:
    data = pd_data(rooter={}, router={"port": 0}, pool={"protocol": "udp"})
    del data["model"]["path"]
    assert set(complaints(data)) == {"rooter", "router.port", "pool.protocol", "model.path"}


@pytest.mark.parametrize(
    ("text", "syntax", "says"),
    [
        ("name = ", "toml", "write valid TOML"),
        ('name = "a"\nname = "b"', "toml", "write valid TOML"),
        ("{", "json", "write valid JSON"),
        ('{"name": NaN}', "json", "NaN is not a JSON number"),
        ('{"model": {"path": "/a", "path": "/b"}}', "json", "key 'path' is given twice"),
        ("[1]", "json", "the top level is list, not a table"),
        pytest.param('{"a":' * 100_000, "json", "nested too deep", id="deep"),
    ],
)
def test_text_that_is_no_job_file(text: str, syntax: str, says: str) -> None:
    with pytest.raises(SpecError, match="syntax: ") as caught:
        parse_job_text(text, source="job", syntax=syntax)
    assert says in str(caught.value)


def test_a_file_that_cannot_be_read(tmp_path: Path) -> None:
    (tmp_path / "job.toml").write_bytes(b"\xff\xfe")
    for path in (tmp_path / "job.toml", tmp_path / "absent.toml", tmp_path):
        with pytest.raises(SpecError, match="give a readable job file"):
            load_job_file(path)


@pytest.mark.parametrize(
    ("data", "field"),
    [
        ({"roles.decode": {"replicas": 1}, "roles": {"decode": {"replicas": 2}}}, "roles.decode.replicas"),
        ({"roles.decode": 1, "roles": {"decode": {}}}, "roles.decode"),
        ({"kv_offload": "none", "kv_offload.cpu": {}}, "kv_offload"),
    ],
)
def test_a_field_given_twice(data: dict[str, Any], field: str) -> None:
    assert list(complaints(data)) == [field]


def test_dotted_keys_meet_in_one_table() -> None:
    spec = load({**pd_data(), "router.port": 9000, "router.retries": 2})
    assert (spec.router.port, spec.router.retries) == (9000, 2)


@pytest.mark.parametrize("suffix", ["toml", "json"])
def test_overrides_win(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"job.{suffix}"
    path.write_text(
        TOML if suffix == "toml" else json.dumps({**JSON, "roles.decode.replicas": 8, "roles": {"prefill": {}}})
    )
    spec = load_job_file(
        path,
        [
            "roles.decode.replicas=2",
            "name=other",
            'pool.lease_ttl="2m"',
            "kv_offload=none",
            "env.MY.NAME='1'",
            "router.retries = 0",
            "engine.hf_overrides={a = 1}",
        ],
    )
    assert spec.roles.decode is not None
    assert (spec.roles.decode.replicas, spec.name, spec.pool.lease_ttl) == (2, "other", 120.0)
    assert (spec.kv_offload, spec.env, spec.router.retries) == ("none", {"MY.NAME": "1"}, 0)
    assert spec.engine["hf_overrides"] == {"a": 1}


@pytest.mark.parametrize(
    ("override", "says"),
    [
        ("roles.decode.replicas", "is not field=value"),
        ("=3", "is not field=value"),
        (
            "name.first=x",
            'name is "swe-rollouts" in the job file, not a table; make name a table there, or set name itself',
        ),
        ("pool.leese_ttl=1s", "did you mean 'lease_ttl'?"),
    ],
)
def test_an_override_that_cannot_be_applied(tmp_path: Path, override: str, says: str) -> None:
    (tmp_path / "job.toml").write_text(TOML)
    with pytest.raises(SpecError) as caught:
        load_job_file(tmp_path / "job.toml", [override])
    assert says in str(caught.value)
