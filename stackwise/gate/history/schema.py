"""Schema: tables of a history in SQLite and PostgreSQL."""

from __future__ import annotations

from sqlalchemy import (
    BigInteger,
    Column,
    Double,
    ForeignKey,
    Index,
    Integer,
    MetaData,
    String,
    Table,
    Text,
    UniqueConstraint,
)

__all__ = [
    "SCHEMA_VERSION",
    "baselines",
    "machines",
    "metadata",
    "results",
    "runs",
    "series",
    "version",
]

# Incremented with every change below. A store of another version is refused.
SCHEMA_VERSION = 2

metadata = MetaData()
# SQLite generates IDs only in a column of the type INTEGER.
_Id = BigInteger().with_variant(Integer(), "sqlite")

version = Table("stackwise_history", metadata, Column("schema_version", Integer, nullable=False))

machines = Table(
    "stackwise_machine",
    metadata,
    Column("id", _Id, primary_key=True),
    Column("key", String(16), nullable=False, unique=True),
    Column("facts", Text, nullable=False),  # JSON
)

runs = Table(
    "stackwise_run",
    metadata,
    Column("id", _Id, primary_key=True),
    Column("identity", String(64), nullable=False, unique=True),
    Column("machine_id", _Id, ForeignKey("stackwise_machine.id"), nullable=False),
    Column("commit_id", Text, nullable=False),
    Column("branch", Text, nullable=False),
    Column("created", BigInteger, nullable=False),  # microseconds since 1970, UTC
    Column("notes", Text, nullable=False),  # JSON
    Index("stackwise_run_by_machine", "machine_id", "created", "id"),
)

series = Table(
    "stackwise_series",
    metadata,
    Column("id", _Id, primary_key=True),
    Column("machine_id", _Id, ForeignKey("stackwise_machine.id"), nullable=False),
    # Digest of test and metric, since a node ID may be too long for an index.
    Column("digest", String(64), nullable=False),
    Column("test", Text, nullable=False),
    Column("metric", String(32), nullable=False),
    UniqueConstraint("machine_id", "digest"),
)

results = Table(
    "stackwise_result",
    metadata,
    Column("id", _Id, primary_key=True),
    Column("series_id", _Id, ForeignKey("stackwise_series.id"), nullable=False),
    Column("run_id", _Id, ForeignKey("stackwise_run.id"), nullable=False),
    # Copied from the run, for the index.
    Column("branch", Text, nullable=False),
    Column("created", BigInteger, nullable=False),
    Column("level", Double, nullable=False),
    Column("log_ratio", Double, nullable=False),
    Column("reference_gemm", Double),  # seconds
    Column("reference_copy", Double),
    Column("verdict", String(16)),
    Column("decision", Text),  # JSON
    Column("standing", String(16), nullable=False),
    UniqueConstraint("run_id", "series_id"),
    Index("stackwise_result_by_time", "series_id", "created", "id"),
)

baselines = Table(
    "stackwise_baseline",
    metadata,
    Column("series_id", _Id, ForeignKey("stackwise_series.id"), primary_key=True),
    Column("branch", String(1024), primary_key=True),
    Column("since", BigInteger, nullable=False),
    Column("commit_id", Text, nullable=False),
    Column("reason", Text, nullable=False),
    Column("set_at", BigInteger, nullable=False),
)
