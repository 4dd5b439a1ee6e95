"""The tables of the state file as this version has them. `migrations/` brings a file to them, and a test holds the two
together; `jobs.py`, `updates.py`, `keeping.py` and `events.py` read and write them.

Times are Unix times. What is known of a job's run goes when another run takes its place; events stay.
"""

from __future__ import annotations

from sqlalchemy import REAL, Column, ForeignKey, Index, Integer, MetaData, Table, Text

TABLES = MetaData()


def _job(*, primary_key: bool = False) -> Column[str]:
    owner = ForeignKey("jobs.name", ondelete="CASCADE")
    return Column("job", Text, owner, primary_key=primary_key, nullable=False)


Table(
    "jobs",
    TABLES,
    Column("name", Text, primary_key=True),
    Column("run_id", Text, nullable=False),
    Column("directory", Text, nullable=False),
    Column("socket_dir", Text, nullable=False),
    Column("plan", Text, nullable=False),
    Column("phase", Text, nullable=False),
    Column("reason", Text, nullable=False),
    Column("created_at", REAL, nullable=False),
    Column("phase_at", REAL, nullable=False),
    Column("opened_at", REAL),
    Column("stop_asked_at", REAL),
    Column("drain_until", REAL),
    Column("ports", Text, nullable=False, server_default="[]"),
)
Table(
    "units",
    TABLES,
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
)
Table(
    "weight_positions",
    TABLES,
    _job(primary_key=True),
    Column("run_id", Text, nullable=False),
    Column("generation", Integer, nullable=False),
    Column("position", Text, nullable=False),
)
Table(
    "weight_updates",
    TABLES,
    _job(primary_key=True),
    Column("number", Integer, primary_key=True),
    Column("request", Text, nullable=False),
    Column("asked_at", REAL, nullable=False),
    Column("outcome", Text, nullable=False),
    Column("why", Text, nullable=False),
    Column("ended_at", REAL),
    Column("is_cancelled", Integer, nullable=False),
    Column("begun_at", REAL),
    Index("weight_updates_by_outcome", "outcome", "asked_at"),
)
Table(
    "weight_remarks",
    TABLES,
    _job(),
    Column("at", REAL, nullable=False),
    Column("text", Text, nullable=False),
)
Table(
    "unit_ends",
    TABLES,
    _job(primary_key=True),
    Column("unit", Text, primary_key=True),
    Column("life", Text, primary_key=True),
    Column("at", REAL, nullable=False),
    Column("ready_s", REAL, nullable=False),
    Column("cause", Text, nullable=False),
)
Table(
    "replica_requests",
    TABLES,
    _job(primary_key=True),
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
    Column("replicas", Integer),
    Column("plan", Text),
    Index("replica_requests_by_outcome", "outcome", "asked_at"),
)
Table(
    "events",
    TABLES,
    Column("seq", Integer, primary_key=True),
    Column("at", REAL, nullable=False),
    Column("job", Text, nullable=False),
    Column("process", Text, nullable=False),
    Column("kind", Text, nullable=False),
    Column("text", Text, nullable=False),
    Column("data", Text, nullable=False),
    Index("events_of_job", "job", "seq"),
    # A cursor stays right when the newest event goes: no number is given twice.
    sqlite_autoincrement=True,
)
