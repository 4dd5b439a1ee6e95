"""The job of this folder, `tests/stale` and `make bench-updates`: two prefill engines that lend the pool its capacity,
and two decode engines that save their cache."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from connectors.engine_client import EngineClient
from tests.e2e.harness import CALL_TIMEOUT_S, UP_TIMEOUT_S, engine_url, router_state, split_job, wait_until
from tests.fleet.control import Control
from tests.fleet.expected import weight_sets
from tests.fleet.versions import FIRST_VERSION

NAME = "fleet"
ROUTER_PORT = 9451
PREFILL = ("prefill-0", "prefill-1")
ENGINES = (*PREFILL, "decode-0", "decode-1")
STORAGE = "storage-prefill-0"
LEASE_S = 15
"""Of a handoff. A prefill engine's pause lasts until those that nobody will read have run out."""
GRACE_S = 2
"""Until the keys of an old epoch are purged."""


def fleet_table(name: str = NAME, pairs: int = 2, model: Path | None = None) -> dict[str, Any]:
    """`model`: the first set of weights, if left out."""
    roles = {"prefill": {"replicas": pairs}, "decode": {"replicas": pairs, "kv_offload": {"cpu": {"num_bytes": 0}}}}
    return split_job(
        name,
        model or weight_sets()[0],
        ROUTER_PORT,
        roles=roles,
        handoff={"lease": LEASE_S},
        weights={"transport": "nixl", "limits": {"grace": GRACE_S, "command": 60}},
        audit={"share": 1},
        monitoring={"enabled": False},
    )


def serves(job: dict[str, Any], control: Control, version: str) -> int:
    """The epoch in which all engines serve this version: so say control plane, router, and each engine's own fence."""
    served, epoch = control.served()
    assert served == version
    state = router_state(job)
    assert state["gate"] == "open"
    assert {replica["epoch"] for replica in state["replicas"]} == {epoch}
    assert {_held(job, name) for name in ENGINES} == {(version, epoch, False)}
    return epoch


def engine_of(job: dict[str, Any], name: str) -> EngineClient:
    """A client of its control routes."""
    return EngineClient(engine_url(job, name), str(Path(job["directory"], "token")), timeout_s=CALL_TIMEOUT_S)


def _held(job: dict[str, Any], name: str) -> tuple[str, int | None, bool]:
    """Version and epoch of an engine, and whether it is paused. One that never loaded knows no name of what it has."""
    with engine_of(job, name) as engine:
        fence = engine.fence()
        return fence.version or FIRST_VERSION, fence.epoch, engine.is_paused()


def wait_whole(job: dict[str, Any], control: Control) -> None:
    """Returns when all engines serve in the one epoch and nobody waits for an update."""
    wait_until(lambda: f"all engines serve: {control.status()}", lambda: _is_whole(job, control), UP_TIMEOUT_S)


def _is_whole(job: dict[str, Any], control: Control) -> bool:
    last = control.get("/weights")["last"]
    if control.status()["phase"] != "ready" or (last is not None and last["outcome"] is None):
        return False
    state, (_, epoch) = router_state(job), control.served()
    in_epoch = [replica["epoch"] for replica in state["replicas"] if replica["usable"]]
    return state["gate"] == "open" and in_epoch == [epoch] * len(ENGINES)
