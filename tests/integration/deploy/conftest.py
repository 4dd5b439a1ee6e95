"""A place to start stub processes in, which ends all of them afterwards whatever the test did."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from deploy.local.backend import LocalBackend
from deploy.local.process_table import Identity, read_identity, read_process, snapshot
from deploy.local.sockets import find_holder, read_sockets
from deploy.unit import LaunchUnit, ListenPort, ListenProbe, RunContext, UnitRecord

STUB = Path(__file__).parents[2] / "fakes" / "stub_process.py"
SLOWEST_S = 20.0
EFFECT_S = 0.3


class Workshop:
    """Starts stubs, as units or on their own, and knows their pids by label."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.pid_folder = folder / "pids"
        self.pid_folder.mkdir()
        self.run = RunContext(job="test", run_id=uuid.uuid4().hex, log_dir=folder / "logs")
        self.backend = LocalBackend()
        self._born: set[Identity] = set()
        self._records: list[UnitRecord] = []
        self._outsiders: list[subprocess.Popen[bytes]] = []

    def argv(self, *habits: str, label: str = "leader") -> tuple[str, ...]:
        return (sys.executable, str(STUB), "--pid-folder", str(self.pid_folder), "--label", label, *habits)

    def unit(self, *habits: str, name: str = "decode-0", ports: tuple[ListenPort, ...] = ()) -> LaunchUnit:
        return LaunchUnit(
            name=name,
            node="here",
            argv=self.argv(*habits, label=name),
            ports=ports,
            probe=ListenProbe(port=ports[0].port if ports else 1),
            start_stage=0,
            ready_timeout_s=10.0,
            stop_grace_s=1.0,
        )

    def start(self, *habits: str, name: str = "decode-0") -> UnitRecord:
        """Start a unit and wait until it and its children say that they are up."""
        record = self.backend.start(self.run, self.unit(*habits, name=name))
        self._records.append(record)
        self._born.add(Identity(pid=record.pid, start_ticks=record.start_ticks))
        self.pid(name)
        return record

    def start_outsider(self, *habits: str, label: str) -> int:
        """The same script, started by hand: no marker, no record, a session of its own."""
        process = subprocess.Popen(self.argv(*habits, label=label), start_new_session=True)
        self._outsiders.append(process)
        return self.pid(label)

    def pid(self, label: str) -> int:
        """The pid of the stub with this label, once it is up."""
        file = self.pid_folder / f"{label}.pid"
        self.wait_until(file.exists, f"{label} is up")
        pid = int(file.read_text())
        identity = read_identity(pid)
        if identity is not None:
            self._born.add(identity)
        return pid

    @staticmethod
    def lives(pid: int) -> bool:
        process = read_process(pid)
        return process is not None and process.alive

    def survives(self, pid: int) -> bool:
        """Still alive after the time in which a signal would have had its effect."""
        ends = time.monotonic() + EFFECT_S
        while time.monotonic() < ends and self.lives(pid):
            time.sleep(0.01)
        return self.lives(pid)

    @staticmethod
    def wait_until(condition: Callable[[], bool], what: str) -> None:
        ends = time.monotonic() + SLOWEST_S
        while not condition():
            assert time.monotonic() < ends, f"waited in vain until {what}"
            time.sleep(0.01)

    def clean_up(self) -> None:
        for file in self.pid_folder.glob("*.pid"):
            self.pid(file.stem)
        marked = {p.identity for p in snapshot().values() if p.marker and p.marker.run_id == self.run.run_id}
        for identity in self._born | marked:
            if read_identity(identity.pid) == identity:
                with suppress(ProcessLookupError):
                    os.kill(identity.pid, signal.SIGKILL)
        for process in self._outsiders:
            process.wait(SLOWEST_S)
        self.wait_until(lambda: not any(_lives(identity) for identity in self._born | marked), "all stubs are gone")
        self.backend.poll(self.run, self._records)


def _lives(identity: Identity) -> bool:
    process = read_process(identity.pid)
    return process is not None and process.identity == identity and process.alive


@pytest.fixture
def workshop(tmp_path: Path) -> Iterator[Workshop]:
    shop = Workshop(tmp_path)
    yield shop
    shop.clean_up()


@pytest.fixture
def free_port() -> int:
    """Below the range of outgoing connections, so that nobody is given it meanwhile."""
    sockets = read_sockets()
    return next(port for port in random.sample(range(20000, 32000), 100) if find_holder(port, sockets) is None)
