"""The tables of version 0.1, which made them without a revision: a file of its own is taken over as it is."""

from __future__ import annotations

from alembic import op
from sqlalchemy import REAL, Column, ForeignKey, Integer, Text

revision = "0001"
down_revision = None


def upgrade() -> None:
    op.create_table(
        "jobs",
        Column("name", Text, primary_key=True),
        Column("run_id", Text, nullable=False),
        Column("directory", Text, nullable=False),
        Column("socket_dir", Text, nullable=False),
        Column("plan", Text, nullable=False),
        Column("phase", Text, nullable=False),
        Column("reason", Text, nullable=False),
        Column("created_at", REAL, nullable=False),
        Column("phase_at", REAL, nullable=False),
        if_not_exists=True,
    )
    op.create_table(
        "units",
        _job(primary_key=True),
        Column("run_id", Text, nullable=False),
        Column("name", Text, primary_key=True),
        Column("node", Text, nullable=False),
        Column("pid", Integer, nullable=False),
        Column("start_ticks", Integer, nullable=False),
        Column("boot_id", Text, nullable=False),
        Column("log", Text, nullable=False),
        Column("started_at", REAL, nullable=False),
        Column("ready_at", REAL),
        if_not_exists=True,
    )
    op.create_table(
        "weight_positions",
        _job(primary_key=True),
        Column("run_id", Text, nullable=False),
        Column("generation", Integer, nullable=False),
        Column("position", Text, nullable=False),
        if_not_exists=True,
    )
    op.create_table(
        "weight_updates",
        _job(primary_key=True),
        Column("number", Integer, primary_key=True),
        Column("request", Text, nullable=False),
        Column("asked_at", REAL, nullable=False),
        Column("outcome", Text, nullable=False),
        Column("why", Text, nullable=False),
        Column("ended_at", REAL),
        Column("is_cancelled", Integer, nullable=False),
        if_not_exists=True,
    )
    op.create_table(
        "weight_remarks",
        _job(),
        Column("at", REAL, nullable=False),
        Column("text", Text, nullable=False),
        if_not_exists=True,
    )


def _job(*, primary_key: bool = False) -> Column[str]:
    owner = ForeignKey("jobs.name", ondelete="CASCADE")
    return Column("job", Text, owner, primary_key=primary_key, nullable=False)
