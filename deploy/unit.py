"""What a launch backend is given and what it tells back: data only.

The planner (`orchestrator/plan`) makes `LaunchUnit`s; a backend (`deploy/local`) carries them out and
answers with `UnitRecord`s, which the orchestrator keeps, and `UnitStatus`es. Nothing here says what a
process is for.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path


@dataclass(frozen=True, kw_only=True)
class ListenProbe:
    """Ready when a process of the unit itself listens on TCP `port`.

    Read from the kernel's socket table. A connection would prove less: a client that connects to a
    free port of the ephemeral range can reach itself.
    """

    port: int


@dataclass(frozen=True, kw_only=True)
class HttpProbe:
    """Ready when `GET url` answers 200."""

    url: str
    token_file: Path | None = None
    """With the bearer token to send, where the unit asks for one."""


@dataclass(frozen=True, kw_only=True)
class MetricProbe:
    """Ready when the sum of `metric`'s samples in the Prometheus text at `url` is at least `at_least`."""

    url: str
    metric: str
    at_least: float


Probe = ListenProbe | HttpProbe | MetricProbe


@dataclass(frozen=True, kw_only=True)
class ListenPort:
    """One TCP port that a unit will listen on."""

    name: str
    """What the port is for, as a user would say it: "rpc", "metrics", "http", "side channel"."""
    port: int
    setting: str = ""
    """The job file's field that moves it, for who must; empty where there is none."""


@dataclass(frozen=True, kw_only=True)
class PortRange:
    """Neighbouring TCP ports of which a unit takes some, at random."""

    name: str
    """What they are for, as a user would say it."""
    first: int
    count: int
    needed: int
    """How many must be free for the unit to find what it takes."""
    setting: str = ""
    """As for `ListenPort`."""


@dataclass(frozen=True, kw_only=True)
class PlannedFile:
    """A file that must exist before the first unit starts."""

    path: Path
    text: str


@dataclass(frozen=True, kw_only=True)
class LaunchUnit:
    """One process (with all its children) on one node."""

    name: str
    """Unique in the job, e.g. "prefill-0"; also the name of its log."""
    node: str
    argv: tuple[str, ...]
    env: Mapping[str, str] = field(default_factory=dict)
    """Added to the launching environment, and stronger than it."""
    unset_env: tuple[str, ...] = ()
    """Names removed from the launching environment; one that ends in "*" stands for all that begin so ("UCX_*").
    What `env` sets stays set."""
    cwd: Path | None = None
    """The folder it runs in; the launcher's own where None."""
    ports: tuple[ListenPort, ...] = ()
    port_ranges: tuple[PortRange, ...] = ()
    probe: Probe
    start_stage: int
    """Units of stage k start when every unit of the stages below k is ready."""
    ready_timeout_s: float
    stop_grace_s: float
    """Seconds between SIGTERM and SIGKILL."""


@dataclass(frozen=True, kw_only=True)
class RunContext:
    """One attempt to run a job. All that is started carries `run_id` in its environment."""

    job: str
    run_id: str
    log_dir: Path
    private_dir: Path | None = None
    """For this user alone, and there before any planned file is written; None where the run needs none."""


@dataclass(frozen=True, kw_only=True)
class UnitRecord:
    """What finds a started unit again after any crash. Kept by the orchestrator."""

    name: str
    node: str
    pid: int
    start_ticks: int
    """Field 22 of /proc/PID/stat, clock ticks since boot: tells a reused pid apart."""
    boot_id: str
    """/proc/sys/kernel/random/boot_id: after a reboot nothing of a run is left."""
    log: Path


@dataclass(frozen=True, kw_only=True)
class UnitStatus:
    """What a backend sees of one unit."""

    name: str
    alive: bool
    """The leading process lives (a zombie does not)."""
    members: tuple[int, ...]
    """Pids of all living processes of the unit, children that outlived the leader included."""
    exit_code: int | None
    """As `subprocess` gives it (negative: signal); None while alive, or where another process was the parent."""
