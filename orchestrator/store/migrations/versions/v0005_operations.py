"""When a run came up and when its end was asked for, as far as events tell; until when it drains; when an update was
begun. Updates and requests by their outcome."""

from __future__ import annotations

from alembic import op
from sqlalchemy import REAL, Column

revision = "0005"
down_revision = "0004"

_FIRST_IN_PHASES = """(
    SELECT min(events.at) FROM events WHERE events.job = jobs.name AND kind = 'job_phase'
    AND json_extract(data, '$.run_id') = run_id AND json_extract(data, '$.phase') IN ({phases})
)"""


def upgrade() -> None:
    for name in ("opened_at", "stop_asked_at", "drain_until"):
        op.add_column("jobs", Column(name, REAL))
    opened = _FIRST_IN_PHASES.format(phases="'ready', 'degraded'")
    op.execute(f"UPDATE jobs SET opened_at = coalesce({opened}, phase_at) WHERE phase IN ('ready', 'degraded')")
    stopped = _FIRST_IN_PHASES.format(phases="'stopping', 'stopped'")
    op.execute(
        f"UPDATE jobs SET opened_at = {opened}, stop_asked_at = coalesce({stopped}, phase_at)"
        " WHERE phase IN ('stopping', 'stopped')"
    )
    op.execute(f"UPDATE jobs SET opened_at = {opened} WHERE phase = 'failed'")
    op.add_column("weight_updates", Column("begun_at", REAL))
    op.create_index("weight_updates_by_outcome", "weight_updates", ["outcome", "asked_at"])
    op.create_index("replica_requests_by_outcome", "replica_requests", ["outcome", "asked_at"])
