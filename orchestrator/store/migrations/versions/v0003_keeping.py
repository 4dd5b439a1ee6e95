"""Ends of processes, and what somebody asked of one: `unit_ends`, `replica_requests`."""

from __future__ import annotations

from alembic import op
from sqlalchemy import REAL, Column, ForeignKey, Integer, Text

revision = "0003"
down_revision = "0002"


def upgrade() -> None:
    op.create_table(
        "unit_ends",
        _job(),
        Column("unit", Text, primary_key=True),
        Column("life", Text, primary_key=True),
        Column("at", REAL, nullable=False),
        Column("ready_s", REAL, nullable=False),
        Column("cause", Text, nullable=False),
    )
    op.create_table(
        "replica_requests",
        _job(),
        Column("number", Integer, primary_key=True),
        Column("kind", Text, nullable=False),
        Column("unit", Text, nullable=False),
        Column("why", Text, nullable=False),
        Column("is_forced", Integer, nullable=False),
        Column("life", Text, nullable=False),
        Column("asked_at", REAL, nullable=False),
        Column("begun_at", REAL),
        Column("outcome", Text, nullable=False),
        Column("note", Text, nullable=False),
        Column("ended_at", REAL),
    )


def _job() -> Column[str]:
    return Column("job", Text, ForeignKey("jobs.name", ondelete="CASCADE"), primary_key=True, nullable=False)
