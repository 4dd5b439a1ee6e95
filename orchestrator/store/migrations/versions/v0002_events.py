"""What happened: `events`."""

from __future__ import annotations

from alembic import op
from sqlalchemy import REAL, Column, Integer, Text

revision = "0002"
down_revision = "0001"


def upgrade() -> None:
    op.create_table(
        "events",
        Column("seq", Integer, primary_key=True),
        Column("at", REAL, nullable=False),
        Column("job", Text, nullable=False),
        Column("process", Text, nullable=False),
        Column("kind", Text, nullable=False),
        Column("text", Text, nullable=False),
        Column("data", Text, nullable=False),
        sqlite_autoincrement=True,
    )
    op.create_index("events_of_job", "events", ["job", "seq"])
