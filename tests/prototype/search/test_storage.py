"""Storages of studies: a database whose tables another process is making, and one that cannot be had."""

import sqlite3
from contextlib import closing

import optuna
import pytest
import sqlalchemy

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


def test_a_sqlite_file_is_closed_after_each_use(tmp_path):
    is_open = {}

    def opened(connection, record):
        is_open[id(record)] = True

    def closed(connection, record):
        is_open[id(record)] = False

    sqlalchemy.event.listen(sqlalchemy.pool.Pool, "connect", opened)
    sqlalchemy.event.listen(sqlalchemy.pool.Pool, "close", closed)
    try:
        study = optuna.create_study(storage=open_storage(f"sqlite:///{tmp_path / 'a.db'}"))
        study.optimize(lambda trial: trial.suggest_float("x", 0, 1), n_trials=2)
        open_storage(f"sqlite:///{tmp_path / 'a.db'}", create=False).get_all_studies()
    finally:
        sqlalchemy.event.remove(sqlalchemy.pool.Pool, "connect", opened)
        sqlalchemy.event.remove(sqlalchemy.pool.Pool, "close", closed)
    assert is_open and not any(is_open.values())


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


@pytest.mark.parametrize("tables", [[], ["photo"], ["photo", "studies"]])
def test_a_database_of_something_else_is_left_as_it_is(tmp_path, tables):
    path = tmp_path / "photos.db"
    path.touch()
    with closing(sqlite3.connect(path)) as database:
        for table in tables:
            database.execute(f"create table {table} (id int)")
        database.commit()
    before = path.read_bytes()
    with pytest.raises(ValueError, match=r"storage: got .*photos\.db'; allowed: a database with studies"):
        open_storage(f"sqlite:///{path}", create=False)
    assert path.read_bytes() == before


def test_database_with_optuna_and_other_tables_is_opened_unchanged(tmp_path):
    path = tmp_path / "photos.db"
    with closing(sqlite3.connect(path)) as database:
        database.execute("create table photo (id int)")
    open_storage(f"sqlite:///{path}").engine.dispose()
    before = path.read_bytes()
    found = open_storage(f"sqlite:///{path}", create=False)
    assert found.get_all_studies() == []
    found.engine.dispose()
    assert path.read_bytes() == before


@pytest.mark.parametrize("create", [True, False])
@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("sqlite.x:///a.db", r"sqlite\.x://\*\*\*: Could not parse"),
        ("none://host/a", r"none://host/a: Can't load plugin"),
    ],
)
def test_an_url_of_no_database_is_named(url, said, create):
    with pytest.raises(OSError, match=f"storage: {said}"):
        open_storage(url, create=create)


def test_what_is_no_database_is_named(tmp_path):
    path = tmp_path / "a.db"
    path.write_text("no database" * 100)
    with pytest.raises(OSError, match=r"storage: .*a\.db: .*not a database"):
        open_storage(f"sqlite:///{path}", create=False)


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
