"""Looks at this machine for what keeps a job from running here; `diagnoses.py` says what each find means."""

from __future__ import annotations

import ctypes
import importlib.metadata
import os
import platform
import resource
import shutil
import sys
from pathlib import Path

from connectors.abilities import EngineNotFound, ask
from connectors.types import EngineAbilities
from orchestrator.observe import diagnoses
from orchestrator.observe.diagnoses import LIBRARIES, Diagnosis
from orchestrator.observe.machine import read_or_nothing, this_machine

PACKAGES = ("fastapi", "aiohttp", "pydantic", "prometheus-client", "httpx")
SHARED_MEMORY = Path("/dev/shm")
PORT_RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")


def diagnose(python: str, home: Path) -> list[Diagnosis]:
    """Everything that is looked at, in the order shown. `python`: the engine stack's interpreter."""
    node = this_machine()
    abilities, engine_missing = _engine(python)
    folder = _nearest_folder(home)
    return [
        diagnoses.system(
            platform.system(), f"{platform.release()} on {platform.machine()}, Python {platform.python_version()}"
        ),
        diagnoses.cores_and_memory(node),
        diagnoses.gpus(node, abilities.platform if abilities else None),
        *(diagnoses.library(name, _loading_problem(name)) for name in LIBRARIES),
        diagnoses.open_files(*_limits(resource.RLIMIT_NOFILE)),
        diagnoses.locked_memory(*_limits(resource.RLIMIT_MEMLOCK)),
        diagnoses.state_folder(folder, _free_bytes(folder), writable=os.access(folder, os.W_OK | os.X_OK)),
        diagnoses.shared_memory(SHARED_MEMORY, _free_bytes(SHARED_MEMORY)),
        diagnoses.control_plane(sys.executable, {name: _version(name) for name in PACKAGES}),
        *(diagnoses.engine_stack(abilities) if abilities else [diagnoses.engine_missing(engine_missing)]),
        diagnoses.outgoing_ports(read_or_nothing(PORT_RANGE)),
        diagnoses.prometheus(shutil.which("prometheus")),
    ]


def _engine(python: str) -> tuple[EngineAbilities | None, str]:
    try:
        return ask(python), ""
    except EngineNotFound as error:
        return None, str(error)


def _nearest_folder(home: Path) -> Path:
    """`home`, or the nearest folder above it that exists: there it would be made."""
    return next((folder for folder in (home, *home.parents) if os.path.lexists(folder)), Path("/"))


def _loading_problem(library: str) -> str | None:
    try:
        ctypes.CDLL(library)
    except OSError as error:
        return str(error)
    return None


def _limits(which: int) -> tuple[int | None, int | None]:
    """(soft, hard); None: unlimited."""
    soft, hard = (None if limit == resource.RLIM_INFINITY else limit for limit in resource.getrlimit(which))
    return soft, hard


def _free_bytes(folder: Path) -> int | None:
    try:
        return shutil.disk_usage(folder).free
    except OSError:
        return None


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
