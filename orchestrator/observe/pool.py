"""Asks a pool's master how much of the pool is used."""

from __future__ import annotations

from connectors.pool_client import PoolCallFailed, PoolClient, PoolUse
from orchestrator.plan.types import PoolPlan

CALL_TIMEOUT_S = 1.0


def pool_use(pool: PoolPlan) -> PoolUse | str:
    """Its use, or why that is not known."""
    client = PoolClient(python=pool.python, master_address=pool.master_address, metrics_url=pool.metrics_url)
    try:
        return client.use(CALL_TIMEOUT_S)
    except PoolCallFailed as error:
        return str(error)
