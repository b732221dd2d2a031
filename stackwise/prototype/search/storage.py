"""Storage of a study: a journal file, any storage that Optuna supports, or the memory of this process."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stackwise.prototype.search.optuna_import import import_optuna, quiet_optuna
from stackwise.support.arguments import require
from stackwise.support.files import parse_json

if TYPE_CHECKING:
    from optuna.storages import BaseStorage

__all__ = ["JOURNAL", "MEMORY", "open_storage", "place_of", "shown_place"]

JOURNAL = "search.journal"
MEMORY = "memory"
_FIRST_LINE = b'{"op_code":0,"worker_id":'  # start of a journal, as Optuna writes it
_TABLES = {"studies", "version_info"}  # two of the tables that Optuna creates in a database
_SQLITE_WAIT = 60.0  # seconds to wait while another process writes
# Error messages of databases for tables that another process is creating.
_HALF_THERE = (
    "already exists",
    "UNIQUE constraint failed",
    "duplicate key",
    "Duplicate entry",
    "no such table",
    "UndefinedTable",
)


def place_of(storage: Any) -> str | BaseStorage:
    """Return `storage` in a form that can be passed to every process of a search.

    Args:
        storage: None is `search.journal` in the current folder; a path is a journal file, or a folder that
            contains one; a text with "://" is an Optuna URL (sqlite:///FILE, postgresql://..., mysql://...);
            "memory" is lost with the process; an Optuna storage is returned unchanged.

    Raises:
        ValueError: another value.
    """
    optuna = import_optuna()
    if isinstance(storage, optuna.storages.BaseStorage):
        return storage  # type: ignore[no-any-return]
    if storage is None:
        storage = JOURNAL
    require(isinstance(storage, str | os.PathLike), "storage", storage, "a path, an Optuna URL, or 'memory'")
    if isinstance(storage, str) and (storage == MEMORY or "://" in storage):
        return storage
    path = Path(storage).absolute()
    return str(path / JOURNAL if path.is_dir() else path)


def shown_place(place: str | BaseStorage) -> str:
    """Return a place as text for users: a URL without its password, an Optuna storage as its type."""
    if not isinstance(place, str):
        return type(place).__name__
    if "://" not in place:
        return place
    from sqlalchemy import make_url
    from sqlalchemy.exc import ArgumentError

    try:
        url = make_url(place)
    except (ArgumentError, ValueError):
        return place.partition("://")[0] + "://***"
    return place if url.password is None else url.render_as_string()


def open_storage(place: str | BaseStorage, *, create: bool = True) -> BaseStorage:
    """Return the storage at a result of `place_of`. With `create=False`, nothing is created or repaired.

    Raises:
        ValueError: with `create=False`, a missing file, or a database without Optuna's tables; a file that is
            not a journal.
        OSError: the storage cannot be created or read.
    """
    if not isinstance(place, str):
        return place
    with quiet_optuna() as optuna:
        if place == MEMORY:
            return optuna.storages.InMemoryStorage()  # type: ignore[no-any-return]
        if "://" in place:
            return _database(optuna, place, create=create)
        path = Path(place)
        require(create or path.is_file(), "storage", place, "a journal file that is there")
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.exists() and path.stat().st_size:
            _check_journal(path)
            if create:
                _mend_journal(optuna, path)
        backend = optuna.storages.journal.JournalFileBackend(place)
        try:
            return optuna.storages.JournalStorage(backend)  # type: ignore[no-any-return]
        except (ValueError, KeyError, TypeError, UnicodeDecodeError) as error:
            raise ValueError(f"storage: {place} is no journal of Optuna: {error}") from None


def _check_journal(path: Path) -> None:
    """Raise ValueError for a file that is not a journal, by the start of its first line.

    An incomplete first line, for example after a full disk, is accepted as an empty journal.
    """
    with path.open("rb") as file:
        line = file.readline()
    try:
        first = parse_json(line)
    except ValueError:
        first = None
    is_journal = isinstance(first, dict) and {"op_code", "worker_id"} <= first.keys()
    if not line.endswith(b"\n"):
        is_journal = is_journal or line[: len(_FIRST_LINE)] == _FIRST_LINE[: len(line)]
    require(is_journal, "storage", str(path), "a journal of Optuna, or a file that is not there yet")


def _mend_journal(optuna: Any, path: Path) -> None:
    """Remove an incomplete last line, for example after a full disk.

    Otherwise, everything that is appended to it would be unreadable.
    """
    with path.open("rb") as file:
        file.seek(-1, os.SEEK_END)
        if file.read() == b"\n":
            return
    lock = optuna.storages.journal.JournalFileSymlinkLock(str(path))
    lock.acquire()
    try:
        os.truncate(path, path.read_bytes().rfind(b"\n") + 1)
    finally:
        lock.release()


def _check_database(url: str, options: dict[str, Any]) -> None:
    """Raise ValueError for a database without studies. SQLite or Optuna would otherwise create them."""
    import sqlalchemy

    shown = shown_place(url)
    try:
        engine = sqlalchemy.create_engine(url, **options)
    except (sqlalchemy.exc.SQLAlchemyError, ValueError) as error:
        raise OSError(f"storage: {shown}: {error}") from error
    if engine.dialect.name == "sqlite" and "uri" not in engine.url.query:  # a URI has its own mode
        require(Path(engine.url.database or "").is_file(), "storage", shown, "a database that is there")
    try:
        tables = set(sqlalchemy.inspect(engine).get_table_names())
    except sqlalchemy.exc.SQLAlchemyError as error:
        raise OSError(f"storage: {shown}: {error}") from error
    finally:
        engine.dispose()
    require(tables >= _TABLES, "storage", shown, "a database with studies of Optuna")


def _database(optuna: Any, url: str, *, create: bool) -> BaseStorage:
    options: dict[str, Any] = {"connect_args": {"timeout": _SQLITE_WAIT}} if url.startswith("sqlite") else {}
    if not create:
        _check_database(url, options)
    if url.startswith("sqlite:///") and ":memory:" not in url:
        from sqlalchemy.pool import NullPool

        options["poolclass"] = NullPool  # Optuna never closes pooled connections
    for attempt in range(5):
        try:
            return optuna.storages.RDBStorage(url, engine_kwargs=options)  # type: ignore[no-any-return]
        except (optuna.exceptions.OptunaError, ImportError):
            raise
        except Exception as error:
            # If two processes create the tables of one database at the same time, one may find them
            # incomplete.
            if attempt == 4 or not any(text in str(error) for text in _HALF_THERE):
                raise OSError(f"storage: {shown_place(url)}: {error}") from error
            time.sleep(0.2 * (attempt + 1))
    raise AssertionError("unreachable")
