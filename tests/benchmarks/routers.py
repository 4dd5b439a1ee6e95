"""Our router and the peer, each started as a user would, in front of the same stub engines.

`parts.py` measures what this module hands it: a port that answers, and the process whose costs are counted.
"""

from __future__ import annotations

import http.client
import json
import secrets
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pydantic import ValidationError

from router.settings import TOKEN_FILE_VARIABLE, RouterSettings
from tests.benchmarks.processes import BenchmarkError, Process, free_ports, started
from tests.benchmarks.requirements import PEER_PROGRAM
from tests.benchmarks.stub_engines import COMPLETION_TEXT
from tests.benchmarks.stubs import ROLES, Stubs
from tests.benchmarks.workload import PATH, SESSION_HEADER, completion_body

Contestant = Literal["ours", "peer"]
CONTESTANTS: tuple[Contestant, ...] = ("ours", "peer")
START_S = 40.0


@dataclass(frozen=True, kw_only=True)
class Router:
    """A router that serves."""

    contestant: Contestant
    port: int
    process: Process


def running(
    contestant: Contestant, stubs: Stubs, folder: Path, settings: Mapping[str, Any], *, profile: Path | None = None
) -> AbstractContextManager[Router]:
    """One router, ready. `settings` change fields of ours; with `profile` ours runs under cProfile."""
    return _peer(stubs, folder) if contestant == "peer" else _ours(stubs, folder, settings, profile=profile)


@contextmanager
def _ours(stubs: Stubs, folder: Path, settings: Mapping[str, Any], *, profile: Path | None) -> Iterator[Router]:
    port, internal_port = free_ports(2)
    engines = [
        {"name": f"{role}-{number}", "role": role, "url": url}
        for role in ROLES
        for number, url in enumerate(stubs.urls(role))
    ]
    values = {
        "job": "bench",
        "host": "127.0.0.1",
        "port": port,
        "internal_host": "127.0.0.1",
        "internal_port": internal_port,
        "engines": engines,
        "session_headers": [SESSION_HEADER],
        "handoff_lease_s": 30.0,
    }
    config, token_file, token = folder / "router.json", folder / "token", secrets.token_hex(16)
    try:
        config.write_text(RouterSettings.model_validate({**values, **settings}).model_dump_json())
    except ValidationError as error:
        raise BenchmarkError(f"--settings: {error}") from error
    token_file.write_text(token)
    profiler = [] if profile is None else ["-m", "cProfile", "-o", str(profile)]
    argv = [sys.executable, *profiler, "-m", "router.main", "--config", str(config)]
    with started("router", argv, folder=folder, environment={TOKEN_FILE_VARIABLE: str(token_file)}) as process:
        _wait(process, lambda: _open_gate(internal_port, token))
        _wait(process, lambda: _completes(port, stubs))
        yield Router(contestant="ours", port=port, process=process)


@contextmanager
def _peer(stubs: Stubs, folder: Path) -> Iterator[Router]:
    port, metrics_port = free_ports(2)
    argv = [
        str(PEER_PROGRAM),
        "--vllm-pd-disaggregation",
        *_options("--prefill", stubs.urls("prefill")),
        *_options("--decode", stubs.urls("decode")),
        *_options("--policy", ["sticky_least_loaded"]),
        *_options("--request-id-headers", [SESSION_HEADER]),
        *_options("--host", ["127.0.0.1"]),
        *_options("--port", [str(port)]),
        *_options("--prometheus-port", [str(metrics_port)]),
        # Its quietest level: otherwise it writes a line for each new session.
        *_options("--log-level", ["error"]),
        *_options("--worker-startup-check-interval", ["1"]),
    ]
    with started("peer", argv, folder=folder) as process:
        _wait(process, lambda: _completes(port, stubs))
        yield Router(contestant="peer", port=port, process=process)


def _options(name: str, values: Sequence[str]) -> list[str]:
    return [word for value in values for word in (name, value)]


def _wait(process: Process, is_ready: Callable[[], bool]) -> None:
    deadline = time.monotonic() + START_S
    while not is_ready():
        process.check_alive()
        if time.monotonic() > deadline:
            raise BenchmarkError(f"{process.name} was not ready within {START_S:g} s. {process.log_end()}")
        time.sleep(0.05)


def _open_gate(internal_port: int, token: str) -> bool:
    """Name the epoch, where the router knows epochs, and let requests through."""
    status, _ = _post(internal_port, "/epochs", {"epoch": 1, "version": "bench"}, token)
    if status not in (200, 404):
        return False
    return _post(internal_port, "/gate", {"gate": "open"}, token)[0] == 200


def _completes(port: int, stubs: Stubs) -> bool:
    """Does a request come back with what the decode stub says?"""
    status, start = _post(port, PATH, json.loads(completion_body(10, stream=stubs.are_streaming)))
    return status == 200 and COMPLETION_TEXT.encode() in start


def _post(port: int, path: str, body: Any, token: str | None = None) -> tuple[int, bytes]:
    """Status and the first piece of the body, which may be a stream; status 0 where nothing answers."""
    headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {token}"} if token else {})
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
    try:
        connection.request("POST", path, json.dumps(body), headers)
        reply = connection.getresponse()
        return reply.status, reply.read1()
    except OSError:
        return 0, b""
    finally:
        connection.close()
