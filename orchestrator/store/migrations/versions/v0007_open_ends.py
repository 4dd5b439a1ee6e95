"""What was open when its run ended has ended with it: `weight_updates`, `replica_requests`."""

from __future__ import annotations

from alembic import op

revision = "0007"
down_revision = "0006"


def upgrade() -> None:
    for table, why in (("weight_updates", "why"), ("replica_requests", "note")):
        op.execute(
            f"UPDATE {table} SET outcome = 'cancelled', {why} = 'the job has ' || phase, ended_at = phase_at"
            " FROM jobs WHERE name = job AND outcome = '' AND phase IN ('failed', 'stopped')"
        )
