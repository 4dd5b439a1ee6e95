"""What the planner must be told about the world. Collected by `orchestrator/observe`, given to `build_plan`.

The planner asks nothing itself, so that the same job file and the same facts give the same plan, byte for byte.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from connectors.layout import Attention
from connectors.mooncake import EPHEMERAL_PORTS_FROM
from connectors.types import EngineAbilities


@dataclass(frozen=True, kw_only=True)
class NodeFacts:
    name: str
    address: str
    """Reachable from the other nodes; loopback only where the job has one node."""
    cores: tuple[int, ...]
    """CPU cores that processes of this job may use."""
    gpus: int
    """How many GPUs processes of this job may use."""
    memory_bytes: int
    """What its processes may use together: the machine's memory, or the limit of the group they run in."""
    nvlink: bool | None
    """Whether its GPUs see each other by NVLink; None where nobody could tell."""
    visible_gpus: tuple[str, ...] | None = None
    """Ids of those GPUs as CUDA_VISIBLE_DEVICES takes them, where the launching environment names them; None: it does
    not, and they count from 0."""
    bf16: bool = True
    """Whether its CPU computes in bfloat16 itself; otherwise that is emulated, about ten times slower than float32."""
    outgoing_ports_from: int = EPHEMERAL_PORTS_FROM
    """First port that the kernel may give to an outgoing connection."""

    @property
    def gpu_ids(self) -> tuple[str, ...]:
        return tuple(map(str, range(self.gpus))) if self.visible_gpus is None else self.visible_gpus


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
    quantization: str | None = None
    """How the checkpoint is quantised, as its config.json names it; None where it says nothing of it."""


@dataclass(frozen=True, kw_only=True)
class Tools:
    """Programs outside the engine stack; None where not installed."""

    prometheus: str | None


@dataclass(frozen=True, kw_only=True)
class ClusterFacts:
    backends: tuple[str, ...]
    """Those of `launch.backend` that jobs can be started with; a job of any other is only looked at."""
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
