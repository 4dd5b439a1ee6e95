"""The stub engines of one part of the benchmark: two prefill and two decode replicas, in a process per role.

`routers.py` puts a router in front of them. Their counts prove that a router did both legs of each request.
"""

from __future__ import annotations

import json
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.benchmarks.processes import BenchmarkError, Process, free_ports, started
from tests.benchmarks.stub_engines import Role

REPLICAS = 2
ROLES: tuple[Role, ...] = ("prefill", "decode")
START_S = 20.0


@dataclass(frozen=True, kw_only=True)
class Legs:
    """Requests answered by each role."""

    prefill: int
    decode: int


@dataclass(frozen=True, kw_only=True)
class Stubs:
    """Stub engines that run."""

    ports: dict[Role, list[int]]
    processes: dict[Role, Process]
    are_streaming: bool

    def urls(self, role: Role) -> list[str]:
        return [f"http://127.0.0.1:{port}" for port in self.ports[role]]

    def legs(self) -> Legs:
        return Legs(prefill=self._answered("prefill"), decode=self._answered("decode"))

    def _answered(self, role: Role) -> int:
        with urllib.request.urlopen(f"{self.urls(role)[0]}/count", timeout=10) as reply:
            return int(json.load(reply)["answered"])

    def legs_since(self, before: Legs, requests: int, *, in_flight: int) -> Legs:
        """Both legs of each answered request, and no others but those of requests cut off at the end."""
        after = self.legs()
        since = Legs(prefill=after.prefill - before.prefill, decode=after.decode - before.decode)
        for role, legs in (("prefill", since.prefill), ("decode", since.decode)):
            if not requests <= legs <= requests + in_flight:
                raise BenchmarkError(
                    f"{requests} requests were answered, but {legs} {role} legs: the router does not split as it should"
                )
        return since


@contextmanager
def stub_engines(folder: Path, *, step_s: float | None = None) -> Iterator[Stubs]:
    """Engines that answer whole, or stream one token per stream and step."""
    ports = free_ports(REPLICAS * len(ROLES))
    prefill, decode = ports[:REPLICAS], ports[REPLICAS:]
    program = [sys.executable, "-m", "tests.benchmarks.stub_engines"]
    streaming = [] if step_s is None else ["--step-s", str(step_s)]
    with (
        started("prefill-stubs", [*program, "--role", "prefill", "--ports", *map(str, prefill)], folder=folder) as p,
        started(
            "decode-stubs", [*program, "--role", "decode", "--ports", *map(str, decode), *streaming], folder=folder
        ) as d,
    ):
        stubs = Stubs(
            ports={"prefill": prefill, "decode": decode},
            processes={"prefill": p, "decode": d},
            are_streaming=step_s is not None,
        )
        _wait(stubs)
        yield stubs


def _wait(stubs: Stubs) -> None:
    deadline = time.monotonic() + START_S
    while True:
        for process in stubs.processes.values():
            process.check_alive()
        try:
            stubs.legs()
        except OSError as error:
            if time.monotonic() > deadline:
                raise BenchmarkError(f"the stub engines did not start within {START_S:g} s: {error}") from error
            time.sleep(0.05)
        else:
            return
