"""What the planner must be told about the world. Collected by `orchestrator/observe`, given to `build_plan`.

The planner asks nothing itself, so that the same job file and the same facts give the same plan, byte for byte.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from connectors.layout import Attention
from connectors.types import EngineAbilities


@dataclass(frozen=True, kw_only=True)
class NodeFacts:
    name: str
    address: str
    """Reachable from the other nodes; loopback only where the job has one node."""
    cores: tuple[int, ...]
    """CPU cores that processes of this job may use."""
    gpus: int
    memory_bytes: int
    nvlink: bool | None
    """Whether its GPUs see each other by NVLink; None where nobody could tell."""


@dataclass(frozen=True, kw_only=True)
class ModelFacts:
    """What was found at model.path."""

    location: str
    """What vLLM gets as --model: the folder's absolute path, or the name as it was given."""
    is_folder: bool
    """False: the path is a name for the engine's own cache, about which nothing is known."""
    fingerprint: str
    """Changes when the files change; empty where nothing is known."""
    weight_bytes: int
    attention: Attention


@dataclass(frozen=True, kw_only=True)
class Tools:
    """Programs outside the engine stack; None where not installed."""

    prometheus: str | None


@dataclass(frozen=True, kw_only=True)
class ClusterFacts:
    nodes: tuple[NodeFacts, ...]
    """In order; the first is the head node: master, router and monitoring run there."""
    abilities: EngineAbilities | None
    """None where the engine stack is not installed; then `engine_missing` says why."""
    engine_missing: str
    model: ModelFacts
    tools: Tools
    job_dir: Path
    """The job's own folder: generated files, logs, token, sockets."""
    socket_dir: Path
    """Short path for the engines' unix sockets."""
    headrace_python: str
    """The interpreter that runs the router."""
    reserved_ports: frozenset[int]
    """Ports that other recorded jobs on these nodes have planned."""
