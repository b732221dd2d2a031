"""Where a study is: a journal file, any storage that Optuna knows, or this process's memory."""

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
_FIRST_LINE = b'{"op_code":0,"worker_id":'  # of a journal, as Optuna begins it
_TABLES = {"studies", "version_info"}  # two of those that Optuna makes in a database
_SQLITE_WAIT = 60.0  # seconds, while another process writes
# What databases say of tables that another process has begun to make.
_HALF_THERE = (
    "already exists",
    "UNIQUE constraint failed",
    "duplicate key",
    "Duplicate entry",
    "no such table",
    "UndefinedTable",
)


def place_of(storage: Any) -> str | BaseStorage:
    """`storage` as every process of a search can be told of it.

    Args:
        storage: None is `search.journal` here; a path is a journal file, of a folder the one in it; with "://"
            an Optuna URL (sqlite:///FILE, postgresql://..., mysql://...); "memory" is lost with the process;
            an Optuna storage is itself.

    Raises:
        ValueError: none of these.
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
    """A place for people: of a URL without its password, of an Optuna storage its kind."""
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
    """The storage at a place that `place_of` gave; with `create=False` no file or table is made or mended.

    Raises:
        ValueError: with `create=False`, what is not there, or a database without Optuna's tables; a file that
            is no journal.
        OSError: it cannot be made or read.
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
    """Refuse a file of another kind, by what Optuna begins each line of a journal with.

    A first line that was cut off, as where a disk was full, is one of a journal that has nothing yet.
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
    """Take off a last line that was cut off, as where a disk was full.

    Whatever is appended to such a line can never be read again.
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
    """Refuse what holds no studies: SQLite would make the file, and Optuna its tables in any database."""
    import sqlalchemy

    shown = shown_place(url)
    try:
        engine = sqlalchemy.create_engine(url, **options)
    except (sqlalchemy.exc.SQLAlchemyError, ValueError) as error:
        raise OSError(f"storage: {shown}: {error}") from error
    if engine.dialect.name == "sqlite" and "uri" not in engine.url.query:  # those say it to SQLite itself
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

        options["poolclass"] = NullPool  # Optuna never closes the connections that a pool would keep
    for attempt in range(5):
        try:
            return optuna.storages.RDBStorage(url, engine_kwargs=options)  # type: ignore[no-any-return]
        except (optuna.exceptions.OptunaError, ImportError):
            raise
        except Exception as error:
            # Of two processes that make the tables of one database at a time one finds them half there.
            if attempt == 4 or not any(text in str(error) for text in _HALF_THERE):
                raise OSError(f"storage: {shown_place(url)}: {error}") from error
            time.sleep(0.2 * (attempt + 1))
    raise AssertionError("unreachable")
