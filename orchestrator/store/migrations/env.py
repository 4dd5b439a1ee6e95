"""What alembic runs for each migration: the revisions, on the connection and in the transaction of its caller."""

from __future__ import annotations

from alembic import context

from orchestrator.store.tables import TABLES

context.configure(connection=context.config.attributes["connection"], target_metadata=TABLES)
context.run_migrations()
