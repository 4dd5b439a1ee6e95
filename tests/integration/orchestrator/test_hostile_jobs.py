"""Job files that mean harm, against a running control plane: each is refused with a 4xx, and nothing is written."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from orchestrator.api.problem_kinds import MEDIA_TYPE
from tests.integration.orchestrator.control_plane import RunningControlPlane, running_control_plane
from tests.unit.orchestrator.samples import pd_data

CALLS = ("/jobs", "/render", "/validate")
JSON, TOML = "application/json", "application/toml"

NAMES = (
    "../../escaped",
    "..",
    ".",
    "/tmp/escaped",
    "demo/../../escaped",
    "..\\escaped",
    "de\0mo",
    "demo\n",
    "$(touch escaped)",
    "`touch escaped`",
    "demo; touch escaped",
    "demo|tee escaped",
    "-rf",
    "~root",
    "%2e%2e%2fescaped",
    "{demo}",
    "ԁemo",
    "ｄｅｍｏ",
    "de\u200bmo",
    "de\u202emo",
    "dem\u0131",
    "DEMO",
    "",
    " ",
    "d" * 64,
    "d" * 100_000,
)
FIELDS: tuple[dict[str, Any], ...] = (
    {"model": {"path": "a\0b"}},
    {"ｍodel": {"path": "/models/small"}},
    {"router": {"роrt": 8000}},
    {"router": {"port": 0}},
    {"router": {"port": 65536}},
    {"router": {"port": -1}},
    {"router": {"port": 2**63}},
    {"router": {"port": 8000.5}},
    {"router": {"port": "8000; touch escaped"}},
    {"router": {"host": "127.0.0.1; touch escaped"}},
    {"router": {"host": "$(touch escaped)"}},
    {"router": {"max_wait": "1e400s"}},
    {"roles": {"decode": {"replicas": 10**9}}},
    {"roles": {"decode": {"replicas": -1}}},
    {"roles": {"decode": {"engine": {"tensor_parallel_size": 10**9}}}},
    {"roles": {"../escaped": {}}},
    {"engine": {"a\0b": 1}},
    {"engine": {"hf_overrides": {"a": "\0"}}},
    {"engine": {"max_num_seqs": 2**64}},
    {"env": {"A=B": "x"}},
    {"env": {"A": "x\0y"}},
    {"env": {"": "x"}},
    {"kv_offload": {"disk": {"path": "../escaped"}}},
    {"kv_offload": {"cpu": {"num_bytes": "1e400"}}},
    {"pool": {"cache_prefix": "../escaped"}},
    {"pool": {"cache_prefix": "a b"}},
    {"pool": {"master": "127.0.0.1:1; touch escaped"}},
    {"pool": {"master": "127.0.0.1:１"}},
    {"launch": {"python": "python3"}},
    {"launch": {"python": "../escaped"}},
    {"monitoring": {"retention": "7d; touch escaped"}},
    {"ports": {"base": 10**30}},
)
BODIES: dict[str, tuple[bytes, str]] = {
    "huge": (b'{"name": "' + b"d" * (2 << 20) + b'"}', JSON),
    "deep list": (b'{"engine": ' + b"[" * 50_000 + b"]" * 50_000 + b"}", JSON),
    "deep table": (b'{"engine": ' + b'{"a":' * 200 + b"1" + b"}" * 200 + b"}", JSON),
    "deep TOML": (b"[" + b"a." * 5_000 + b"a]\n", TOML),
    "1e400": (json.dumps(pd_data(engine={"x": 0})).replace('"x": 0', '"x": 1e400').encode(), JSON),
    "NaN": (json.dumps(pd_data(engine={"x": 0})).replace('"x": 0', '"x": NaN').encode(), JSON),
    "nan in TOML": (b'name = "demo"\n[model]\npath = "/m"\n[roles.colocated]\n[engine]\nx = nan\n', TOML),
    "a number of 10,000 digits": (b'{"name": ' + b"9" * 10_000 + b"}", JSON),
    "NUL": (b"\0", TOML),
    "half a surrogate pair": (b'{"name": "\\ud800"}', JSON),
    "UTF-16": ("{}".encode("utf-16"), JSON),
    "20,000 unknown keys": (("{" + ",".join(f'"{n}":0' for n in range(20_000)) + "}").encode(), JSON),
    "a key twice": (("{" + ",".join(f'"{n}":0' for n in range(50_000)) + ',"7":1}').encode(), JSON),
}


@pytest.fixture(scope="module")
def control_plane(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningControlPlane]:
    folder = tmp_path_factory.mktemp("control-plane")
    with running_control_plane(folder, {"HEADRACE_API_TOKEN": "a-known-token"}) as running:
        yield running


@pytest.fixture(scope="module")
def client(control_plane: RunningControlPlane) -> Iterator[httpx.Client]:
    with control_plane.client() as client:
        yield client


@pytest.fixture(autouse=True)
def nothing_is_written(control_plane: RunningControlPlane) -> Iterator[None]:
    """Nor anywhere that the names above could lead to."""
    before = files_below(control_plane.home.parent)
    yield
    assert files_below(control_plane.home.parent) == before
    assert not [place for place in (Path("/tmp/escaped"), Path.cwd() / "escaped") if place.exists()]


def files_below(folder: Path) -> dict[str, int]:
    """But those that a control plane writes all the time."""
    return {
        str(path): path.stat().st_mtime_ns
        for path in folder.rglob("*")
        if path.is_file() and not path.name.startswith(("headrace.db", "serve.log"))
    }


def refused(reply: httpx.Response, call: str) -> None:
    if call == "/validate" and reply.status_code == 200:
        assert reply.json()["errors"]
        return
    assert 400 <= reply.status_code < 500, reply.text
    assert reply.headers["content-type"] == MEDIA_TYPE
    assert reply.json()["detail"]


@pytest.mark.parametrize("call", CALLS)
def test_names(client: httpx.Client, call: str) -> None:
    for name in NAMES:
        refused(client.post(call, json=pd_data(name=name)), call)


@pytest.mark.parametrize("changes", FIELDS, ids=lambda changes: ascii(changes)[:60])
def test_fields(client: httpx.Client, changes: dict[str, Any]) -> None:
    refused(client.post("/jobs", content=json.dumps(pd_data(**changes)), headers={"content-type": JSON}), "/jobs")


@pytest.mark.parametrize("body", BODIES)
@pytest.mark.parametrize("call", CALLS)
def test_bodies(client: httpx.Client, call: str, body: str) -> None:
    content, kind = BODIES[body]
    reply = client.post(call, content=content, headers={"content-type": kind})
    refused(reply, call)
    assert len(reply.content) < 1 << 18
    assert client.get("/health").status_code == 200


@pytest.mark.parametrize("name", ["..", "../..", "..%2f..%2fescaped", "%00", "%ff", "a%0ab", "d" * 5_000, "%E2%80%8B"])
def test_names_in_paths(client: httpx.Client, name: str) -> None:
    for method, rest in (
        ("GET", ""),
        ("DELETE", ""),
        ("DELETE", "/record"),
        ("GET", "/logs/router"),
        ("GET", "/weights"),
    ):
        # The client itself makes "/" of some, which leads to the page.
        assert client.request(method, f"/jobs/{name}{rest}").status_code in (307, 404, 405)


@pytest.mark.parametrize("source", [{"a": 2**70}, {"a": "\ud800"}, {"a": "\0"}, {"a": float("inf")}])
def test_sources_of_weights(client: httpx.Client, source: dict[str, Any]) -> None:
    for path, body in (
        ("/jobs/demo/weights", {"source": source}),
        ("/jobs/demo/rlhf/update_weights", {"update_info": {"source": source}}),
        ("/jobs/demo/rlhf/init_weight_transfer_engine", {"init_info": source}),
    ):
        reply = client.post(path, content=json.dumps(body), headers={"content-type": JSON})
        assert (reply.status_code, reply.headers["content-type"]) == (422, MEDIA_TYPE)
