"""Storages of studies: a database whose tables another process is making, and one that cannot be had."""

import optuna
import pytest

from stackwise.prototype.search import storage
from stackwise.prototype.search.storage import open_storage, shown_place


@pytest.fixture
def pauses(monkeypatch):
    seconds = []
    monkeypatch.setattr(storage.time, "sleep", seconds.append)
    return seconds


@pytest.mark.parametrize(
    "said",
    [
        "(sqlite3.OperationalError) table studies already exists",
        "(sqlite3.OperationalError) no such table: version_info",
        '(psycopg.errors.UndefinedTable) relation "version_info" does not exist',
        "(sqlite3.IntegrityError) UNIQUE constraint failed: alembic_version.version_num",
        '(psycopg2.errors.UniqueViolation) duplicate key value violates unique constraint "version_pkc"',
        "(pymysql.err.IntegrityError) (1062, \"Duplicate entry '1' for key 'PRIMARY'\")",
    ],
)
def test_tables_that_another_process_is_making_are_waited_for(monkeypatch, pauses, tmp_path, said):
    make, calls = optuna.storages.RDBStorage, []

    def half_there(*arguments, **options):
        calls.append(arguments)
        if len(calls) < 3:
            raise RuntimeError(said)
        return make(*arguments, **options)

    monkeypatch.setattr(optuna.storages, "RDBStorage", half_there)
    found = open_storage(f"sqlite:///{tmp_path / 'a.db'}")
    assert isinstance(found, make)
    found.engine.dispose()
    assert (len(calls), len(pauses)) == (3, 2)


def test_tables_that_stay_half_there_are_an_error(monkeypatch, pauses):
    def half_there(*arguments, **options):
        raise RuntimeError("table studies already exists")

    monkeypatch.setattr(optuna.storages, "RDBStorage", half_there)
    with pytest.raises(OSError, match=r"storage: sqlite:///a\.db: table studies already exists"):
        open_storage("sqlite:///a.db")
    assert len(pauses) == 4


def test_a_database_that_cannot_be_had_is_an_error_at_once(pauses, tmp_path):
    with pytest.raises(OSError, match="unable to open database file"):
        open_storage(f"sqlite:///{tmp_path / 'no' / 'a.db'}")
    assert pauses == []


@pytest.mark.parametrize(
    ("place", "shown"),
    [
        ("memory", "memory"),
        ("/a/search.journal", "/a/search.journal"),
        ("sqlite:///a.db", "sqlite:///a.db"),
        ("postgresql+psycopg://me@host/a", "postgresql+psycopg://me@host/a"),
        ("postgresql+psycopg://me:s3cr%40t@host:5/a", "postgresql+psycopg://me:***@host:5/a"),
        ("postgresql://me:s3cr@t@host:x/a", "postgresql://***"),
    ],
)
def test_a_place_is_shown_without_its_password(place, shown):
    assert shown_place(place) == shown


def test_an_error_has_no_password(monkeypatch):
    def refuses(*arguments, **options):
        raise RuntimeError("no route to host")

    monkeypatch.setattr(optuna.storages, "RDBStorage", refuses)
    with pytest.raises(OSError, match=r"storage: postgresql://me:\*\*\*@host/a: no route to host"):
        open_storage("postgresql://me:s3cret@host/a")
