"""How many replicas a request asks for, and the plan that has them: `replica_requests`."""

from __future__ import annotations

from alembic import op
from sqlalchemy import Column, Integer, Text

revision = "0004"
down_revision = "0003"


def upgrade() -> None:
    op.add_column("replica_requests", Column("replicas", Integer))
    op.add_column("replica_requests", Column("plan", Text))
