"""Storage of a study: a SQLite file, any storage that Optuna supports, or the memory of this process."""

from __future__ import annotations

import os
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from stackwise.support.arguments import require

if TYPE_CHECKING:
    from optuna import Study
    from optuna.storages import BaseStorage
    from optuna.trial import FrozenTrial
    from sqlalchemy import Engine

__all__ = [
    "MEMORY",
    "check_storage",
    "has_heartbeat",
    "import_optuna",
    "open_storage",
    "place_of",
    "quiet_optuna",
    "shown_place",
]

MEMORY = "memory"
_FILE = "search.db"
_SQLITE_WAIT = 60.0  # seconds to wait while another process writes
_ATTEMPTS = 4  # to create the tables of a database, which fails while another process creates them

OnStale = Callable[["Study", "FrozenTrial"], None]


def import_optuna() -> ModuleType:
    """Return the package.

    Raises:
        ImportError: Optuna is not installed.
    """
    try:
        import optuna
    except ImportError:
        raise ImportError("a search needs Optuna: pip install 'stackwise[search]'") from None
    return optuna


@contextmanager
def quiet_optuna() -> Iterator[ModuleType]:
    """Context with Optuna's log at the level of errors, without warnings about experimental features."""
    optuna = import_optuna()
    level = optuna.logging.get_verbosity()
    optuna.logging.set_verbosity(max(level, optuna.logging.ERROR))
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
            yield optuna
    finally:
        optuna.logging.set_verbosity(level)


def place_of(storage: Any) -> str | BaseStorage:
    """Return `storage` in a form that can be passed to every process of a search: "memory", a URL, or as is.

    Args:
        storage: None is `search.db` in the current folder; a path is a SQLite file, or a folder that contains
            one; a text with "://" is an Optuna URL (sqlite:///FILE, postgresql://..., mysql://...); "memory"
            is lost with the process; an Optuna storage is returned unchanged.

    Raises:
        ValueError: another value.
    """
    optuna = import_optuna()
    if isinstance(storage, optuna.storages.BaseStorage):
        return storage  # type: ignore[no-any-return]
    if storage is None:
        storage = _FILE
    require(isinstance(storage, str | os.PathLike), "storage", storage, "a path, an Optuna URL, or 'memory'")
    if isinstance(storage, str) and (storage == MEMORY or "://" in storage):
        return storage
    path = Path(storage).absolute()
    return f"sqlite:///{path / _FILE if path.is_dir() else path}"


def shown_place(place: str | BaseStorage) -> str:
    """Return a place as text for users: a URL without its password, an Optuna storage as its type."""
    if not isinstance(place, str):
        return type(place).__name__
    if "://" not in place:
        return place
    from sqlalchemy import make_url
    from sqlalchemy.exc import ArgumentError

    try:
        return make_url(place).render_as_string()
    except (ArgumentError, ValueError):
        return place.partition("://")[0] + "://***"


@contextmanager
def open_storage(
    place: str | BaseStorage, stale_seconds: int = 120, on_stale: OnStale | None = None
) -> Iterator[BaseStorage]:
    """Context with the storage at a result of `place_of`. It is created if it does not exist.

    Args:
        place: result of `place_of`. The other arguments do not apply to the memory and to an Optuna storage.
        stale_seconds: seconds without a heartbeat after which a trial is stale: its process has died.
        on_stale: callback for each stale trial.

    Raises:
        OSError: the storage cannot be created or read.
    """
    if not isinstance(place, str):
        yield place
    elif place == MEMORY:
        yield import_optuna().storages.InMemoryStorage()
    else:
        storage = _database(place, stale_seconds, on_stale)
        try:
            yield storage
        finally:
            storage.remove_session()
            storage.engine.dispose()


def has_heartbeat(place: str | BaseStorage) -> bool:
    """Return True if the storage at a result of `place_of` finds trials whose process has died."""
    if isinstance(place, str):
        return place != MEMORY
    return isinstance(place, import_optuna().storages.RDBStorage) and place.heartbeat_interval is not None


def _database(url: str, stale_seconds: int, on_stale: OnStale | None) -> Any:
    """Return Optuna's storage in a database. Its tables may be created by several processes at a time."""
    from sqlalchemy.exc import SQLAlchemyError

    options = {"connect_args": {"timeout": _SQLITE_WAIT}} if url.startswith("sqlite") else {}
    if url.startswith("sqlite:///"):
        Path(url.removeprefix("sqlite:///")).parent.mkdir(parents=True, exist_ok=True)
    for attempt in range(1, _ATTEMPTS + 1):
        try:
            with quiet_optuna() as optuna:
                storage = optuna.storages.RDBStorage(
                    url,
                    engine_kwargs=options,
                    heartbeat_interval=max(1, stale_seconds // 6),
                    grace_period=stale_seconds,
                    heartbeat_stale_trial_callback=on_stale,
                )
        except (SQLAlchemyError, optuna.exceptions.StorageInternalError, ValueError) as error:
            if attempt == _ATTEMPTS:
                raise OSError(f"storage: {shown_place(url)}: {_first_line(error)}") from error
            time.sleep(0.1 * attempt)
        else:
            if storage.engine.dialect.name == "sqlite":
                _make_atomic(storage.engine)
            return storage
    raise AssertionError("unreachable")


def _make_atomic(engine: Engine) -> None:
    """Lock a SQLite database from the first read of a transaction on.

    By default, Python locks it at the first write, so that two processes could start the same waiting trial.
    With a write-ahead log, a transaction does not wait for the disk.
    """
    from sqlalchemy import event

    engine.dispose()  # the connection without these settings

    @event.listens_for(engine, "connect")
    def connect(connection: Any, _record: object) -> None:
        connection.isolation_level = None
        connection.execute("PRAGMA journal_mode = WAL")
        connection.execute("PRAGMA synchronous = NORMAL")

    @event.listens_for(engine, "begin")
    def begin(connection: Any) -> None:
        connection.exec_driver_sql("BEGIN IMMEDIATE")


def check_storage(place: str | BaseStorage) -> None:
    """Raise an error for a storage that `open_storage` would create. Nothing is created.

    Raises:
        ValueError: a missing file, or a database without Optuna's tables.
        OSError: the database cannot be read.
    """
    if not isinstance(place, str) or place == MEMORY:
        return
    import sqlalchemy

    shown = shown_place(place)
    try:
        engine = sqlalchemy.create_engine(place, poolclass=sqlalchemy.NullPool)
        if engine.dialect.name == "sqlite":
            require(Path(engine.url.database or "").is_file(), "storage", shown, "a database that is there")
        has_studies = {"studies", "version_info"} <= set(sqlalchemy.inspect(engine).get_table_names())
    except sqlalchemy.exc.SQLAlchemyError as error:
        raise OSError(f"storage: {shown}: {_first_line(error)}") from error
    require(has_studies, "storage", shown, "a database with studies of Optuna")


def _first_line(error: Exception) -> str:
    """Return the text of an error without the statement and the link that SQLAlchemy adds."""
    return str(error).partition("\n")[0]
