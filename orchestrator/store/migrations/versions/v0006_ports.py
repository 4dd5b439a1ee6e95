"""The ports that a job has planned, beside its plan: `jobs`."""

from __future__ import annotations

import json
from typing import Any

from alembic import op
from sqlalchemy import Column, Text, text

revision = "0006"
down_revision = "0005"


def upgrade() -> None:
    op.add_column("jobs", Column("ports", Text, nullable=False, server_default="[]"))
    connection = op.get_bind()
    for name, plan in connection.execute(text("SELECT name, plan FROM jobs")).all():
        ports = {"name": name, "ports": json.dumps(_ports(json.loads(str(plan))))}
        connection.execute(text("UPDATE jobs SET ports = :ports WHERE name = :name"), ports)


def _ports(plan: dict[str, Any]) -> list[int]:
    """Of plans as they were written so far; an even older one may have neither."""
    listed = {port["port"] for unit in plan.get("units", ()) for port in unit["ports"]}
    blocks = plan.get("ports", {}).values()
    return sorted(listed.union(*(range(first, first + count) for first, count in blocks)))
