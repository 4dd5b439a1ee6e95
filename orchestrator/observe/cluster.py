"""Collects `ClusterFacts`: the shell before the planner. Everything that the planner may know is asked here, once."""

from __future__ import annotations

import hashlib
import os
import shutil
import sys
import tempfile
from pathlib import Path

from connectors.abilities import EngineNotFound, ask
from connectors.types import EngineAbilities
from orchestrator.observe.machine import this_machine
from orchestrator.observe.model_folder import read_model_folder
from orchestrator.plan.facts import ClusterFacts, Tools
from orchestrator.spec.job import JobSpec


def collect_facts(
    spec: JobSpec, job_dir: Path, reserved_ports: frozenset[int], *, backends: tuple[str, ...]
) -> ClusterFacts:
    """Facts for a job on this machine."""
    abilities: EngineAbilities | None = None
    missing = ""
    try:
        abilities = ask(spec.launch.python or sys.executable)
    except EngineNotFound as error:
        missing = str(error)
    return ClusterFacts(
        backends=backends,
        nodes=(this_machine(),),
        abilities=abilities,
        engine_missing=missing,
        model=read_model_folder(spec.model.path),
        tools=Tools(prometheus=shutil.which("prometheus")),
        job_dir=job_dir,
        socket_dir=_socket_dir(job_dir),
        headrace_python=sys.executable,
        reserved_ports=reserved_ports,
    )


def _socket_dir(job_dir: Path) -> Path:
    """A short folder of the job's own: a unix socket's path has 107 characters at most."""
    digest = hashlib.sha256(str(job_dir).encode()).hexdigest()[:8]
    return Path(tempfile.gettempdir()) / f"headrace-{os.getuid()}-{digest}"
