"""Database: transactions of a history, checks of its tables, and errors without passwords."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from sqlalchemy import Connection, Engine, Table, create_engine, event, inspect, select, text
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.pool import NullPool

from stackwise.gate.history import schema
from stackwise.gate.history.store_url import HistoryError, StoreUrl
from stackwise.support.arguments import check_number

__all__ = ["Database"]

# "swhi": a number identifies an advisory lock of PostgreSQL.
_LOCK = 0x73_77_68_69
_WRITES = "stackwise_writes"


class Database:
    """Database of a history, opened and checked.

    Args:
        where: location of the database.
        create: True to create missing tables.
        timeout_seconds: maximum wait for another writer, or for a server.

    Raises:
        HistoryError: the database cannot be opened, is not a history, is damaged, or has tables of another
            version. It is not changed.
    """

    def __init__(self, where: StoreUrl, *, create: bool, timeout_seconds: float) -> None:
        check_number("timeout_seconds", timeout_seconds, "a number > 0", lambda value: value > 0)
        self._where = where
        if where.path is not None and not create and not where.path.exists():
            raise HistoryError(f"{where.path}: there is no history")
        if where.path is not None and not where.path.parent.is_dir():
            raise HistoryError(f"{where.path}: there is no folder {str(where.path.parent)!r}")
        self._engine = _engine(where, timeout_seconds)
        with self.reading() as connection:
            found = self._has_tables(connection)
            if found and where.path is not None:
                self._check_file(connection)
        if not found and not create:
            raise HistoryError(f"{where.shown}: there is no history")
        if not found:
            self._create()

    @property
    def shown(self) -> str:
        """Location without a password."""
        return self._where.shown

    @contextmanager
    def reading(self) -> Iterator[Connection]:
        """Yield a connection for reading a snapshot of the database. Convert rows inside of the context.

        Raises:
            HistoryError: the database reports an error, shown without a password, or a value that was read is
                not one that `Store.add` writes.
        """
        with self._told(), self._engine.connect() as connection:
            try:
                yield connection
            except HistoryError:
                raise
            except (ValueError, TypeError, KeyError, OverflowError) as error:
                raise self._damaged(str(error)) from None

    @contextmanager
    def writing(self) -> Iterator[Connection]:
        """Yield a connection for one atomic write transaction. Wait for other writers first.

        Raises:
            HistoryError: the database reports an error, shown without a password.
        """
        writer = self._engine.execution_options(**{_WRITES: True})
        with self._told(), writer.begin() as connection:
            yield connection

    def enter(
        self, connection: Connection, table: Table, values: dict[str, Any], unique: list[str]
    ) -> int | None:
        """Insert a row and return its ID; None if a row with the same `unique` columns exists."""
        dialect = postgresql if self._where.path is None else sqlite
        statement = dialect.insert(table).values(**values).on_conflict_do_nothing(index_elements=unique)
        found = connection.execute(statement.returning(table.c.id)).scalar_one_or_none()
        return None if found is None else int(found)

    def close(self) -> None:
        """Close the database."""
        self._engine.dispose()

    def _damaged(self, why: str) -> HistoryError:
        return HistoryError(f"{self.shown}: is damaged: {why}; restore a copy of it, or use another store")

    def _check_file(self, connection: Connection) -> None:
        """Raise HistoryError if pages or indexes of an SQLite file are damaged.

        SQLite reads such a file without an error, and may return fewer rows.
        """
        found = connection.exec_driver_sql("PRAGMA integrity_check(3)").scalars().all()
        if found != ["ok"]:
            raise self._damaged("; ".join(" ".join(str(each).split()) for each in found))

    def _create(self) -> None:
        with self.writing() as connection:
            if self._where.path is None:
                connection.execute(text("SELECT pg_advisory_xact_lock(:lock)"), {"lock": _LOCK})
            # Another process may have created them.
            if not self._has_tables(connection):
                schema.metadata.create_all(connection)
                connection.execute(schema.version.insert().values(schema_version=schema.SCHEMA_VERSION))

    def _has_tables(self, connection: Connection) -> bool:
        names = inspect(connection).get_table_names()
        ours = [table.name for table in schema.metadata.sorted_tables]
        if schema.version.name not in names:
            # A server's database may be shared with other programs, a file is not.
            others = names if self._where.path is not None else [name for name in names if name in ours]
            if others:
                shown = ", ".join(others[:5])
                raise HistoryError(f"{self.shown}: is no history of stackwise: it has the tables {shown}")
            return False
        found = connection.execute(select(schema.version.c.schema_version)).scalars().all()
        if found != [schema.SCHEMA_VERSION]:
            raise HistoryError(
                f"{self.shown}: has tables of version {', '.join(map(str, found)) or 'unknown'}; this "
                f"stackwise reads version {schema.SCHEMA_VERSION}. It was left as it is: use the stackwise "
                "that made it, or another store"
            )
        return True

    @contextmanager
    def _told(self) -> Iterator[None]:
        try:
            yield
        except SQLAlchemyError as error:
            cause = getattr(error, "orig", None) or error
            said = self._where.clean(" ".join(str(cause).split()))
            # The original error has the URL in its frames.
            raise HistoryError(f"{self.shown}: {said}") from None


def _engine(where: StoreUrl, timeout_seconds: float) -> Engine:
    # No pool: a forked process must not share an open connection.
    if where.path is None:
        try:
            import psycopg  # noqa: F401
        except ImportError:
            raise HistoryError(
                "a history in PostgreSQL needs psycopg: pip install 'stackwise[history]'"
            ) from None
        arguments: dict[str, Any] = {"connect_timeout": max(1, round(timeout_seconds))}
        return create_engine(where.url, poolclass=NullPool, connect_args=arguments, hide_parameters=True)
    arguments = {"timeout": timeout_seconds}
    engine = create_engine(where.url, poolclass=NullPool, connect_args=arguments, hide_parameters=True)

    # The driver begins transactions before some statements only, and always as a reader. Two transactions
    # that read and then write would block each other. So the driver begins none, and a writer locks at once.
    @event.listens_for(engine, "connect")
    def _begin_nothing(connection: Any, _record: Any) -> None:
        connection.isolation_level = None
        connection.execute("PRAGMA foreign_keys = ON")

    @event.listens_for(engine, "begin")
    def _begin(connection: Connection) -> None:
        writes = connection.get_execution_options().get(_WRITES, False)
        connection.exec_driver_sql("BEGIN IMMEDIATE" if writes else "BEGIN")

    return engine
