"""`[weights]` of a job file: how new weights reach engines that run."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from connectors.vllm_plugin.weights.settings import LoadMode
from orchestrator.spec.base import SpecModel
from orchestrator.spec.quantity import Seconds

Strategy = Literal["barrier", "rolling"]
InFlightMode = Literal["readmit", "wait", "abort", "keep"]
Transport = Literal["store", "nixl", "path"]


class UpdateLimitsSpec(SpecModel):
    """How long each step of an update may take. What happens then: `orchestrator/weights/README.md`."""

    prefetch: Seconds = 900.0
    """Until every engine has its copy, while all of them generate."""
    hold: Seconds = 30.0
    """Until all router workers have closed the gate."""
    in_flight: Seconds = 120.0
    """Until the requests that run are ended, or have ended."""
    drain: Seconds = 300.0
    """Until a group of a rolling update has no request left."""
    pause: Seconds | None = None
    """Until engines are paused. A prefill engine waits for its unread handoffs: handoff.lease and 30 seconds when left
    out."""
    load: Seconds = 600.0
    command: Seconds = 30.0
    """For steps that are done at once."""
    grace: Seconds = 30.0
    """From the opening of the gate until the older epochs' keys are removed from the pool."""
    again: Seconds = 2.0
    """Between two tries of one command."""
    tries: Annotated[int, Field(ge=1, le=100)] = 3
    """Loads before the fleet goes back to the version before."""
    group_pairs: Annotated[int, Field(ge=1)] = 1
    """Pairs of engines that a rolling update moves at a time, once the new version has a pair."""


class WeightsSpec(SpecModel):
    """Without this section engines keep what they started with."""

    transport: Transport = "path"
    """From a Mooncake volume, from the trainer's own shards, or from a directory that every node can read. Engines get
    ready for it when they start, so that the first load need not; a push may name another one."""
    load_mode: LoadMode = "gpu_fetch"
    """"gpu_fetch": straight into the parameters. "cpu_prefetch": into host memory while the engine generates, then
    into the parameters: a shorter pause, for one more copy of the weights in host memory."""
    keep_copy: bool = True
    """Whether "cpu_prefetch" keeps its copy between updates. Pinning that much memory anew takes many seconds."""
    strategy: Strategy = "barrier"
    """"barrier": all engines at once, while requests wait. "rolling": one group after the other, while the rest
    serve."""
    in_flight: InFlightMode = "readmit"
    """What becomes of requests that run when a barrier closes: run again under the new weights from the tokens that
    they have, waited for, ended with an error, or let live through it."""
    limits: UpdateLimitsSpec = UpdateLimitsSpec()
