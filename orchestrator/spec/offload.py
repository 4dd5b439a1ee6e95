"""Where a role's KV goes beyond the engine's own memory: `[kv_offload]` and `[roles.X.kv_offload]`.

A role inherits the job's block. A role's own block changes what it names and inherits the rest; the string "none"
switches offloading off. `orchestrator/plan/resolve.py` merges the two and builds one of the models here.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from orchestrator.spec.base import SpecModel
from orchestrator.spec.quantity import Bytes, PositiveBytes, Seconds


class MooncakeCpuTier(SpecModel):
    num_bytes: Bytes
    """DRAM that each node of the role lends to the pool. 0 joins the pool without lending anything."""


class NativeCpuTier(SpecModel):
    num_bytes: PositiveBytes
    """DRAM of each engine's own offload tier. Zero would switch the tier off silently, so it is refused."""


class DiskTier(SpecModel):
    path: Annotated[str, Field(pattern="^/")]
    """Absolute folder on every node that lends capacity; one per master."""
    num_bytes: PositiveBytes | None = None
    """Limit of what is kept there, per node; Mooncake's own limit when left out."""


class NativeDiskTier(SpecModel):
    path: Annotated[str, Field(pattern="^/")]
    """Absolute folder on every node of the role. vLLM keeps no limit on what lies there."""


class MooncakeOffload(SpecModel):
    """The job's shared pool: one Mooncake master, storage clients where capacity is lent."""

    type: Literal["mooncake"] = "mooncake"
    cpu: MooncakeCpuTier
    disk: DiskTier | None = None
    lease_ttl: Seconds | None = None
    """How long a block that was looked up cannot be evicted; `pool.lease_ttl` when left out. One value per master."""
    save_decode_cache: bool = True
    """Also save what decode engines generate, so that the next turn's prefill finds it."""


class NativeOffload(SpecModel):
    """vLLM's own CPU (and disk) tier, private to each engine."""

    type: Literal["native"] = "native"
    cpu: NativeCpuTier
    disk: NativeDiskTier | None = None


class NoOffload(SpecModel):
    """KV stays in the engine."""

    type: Literal["none"] = "none"


KvOffload = Annotated[MooncakeOffload | NativeOffload | NoOffload, Field(discriminator="type")]
