"""Storages of studies: a database whose tables another process is making, and one that cannot be had."""

import sqlite3
from contextlib import closing

import optuna
import pytest
import sqlalchemy

from stackwise.prototype.search import storage
from stackwise.prototype.search.storage import check_storage, open_storage, shown_place


@pytest.fixture
def pauses(monkeypatch):
    seconds = []
    monkeypatch.setattr(storage.time, "sleep", seconds.append)
    return seconds


def test_tables_that_another_process_creates_are_waited_for(monkeypatch, pauses, tmp_path):
    make, calls = optuna.storages.RDBStorage, []

    def half_there(*arguments, **options):
        calls.append(arguments)
        if len(calls) < 3:
            raise sqlalchemy.exc.OperationalError("create", {}, Exception("table studies already exists"))
        return make(*arguments, **options)

    monkeypatch.setattr(optuna.storages, "RDBStorage", half_there)
    with open_storage(f"sqlite:///{tmp_path / 'a.db'}") as found:
        assert isinstance(found, make)
    assert (len(calls), len(pauses)) == (3, 2)


def test_two_processes_do_not_start_the_same_waiting_trial(tmp_path):
    path = tmp_path / "a.db"
    with (
        open_storage(f"sqlite:///{path}") as storage,
        storage.engine.begin() as reader,
        closing(sqlite3.connect(path, timeout=0)) as other,
    ):
        reader.exec_driver_sql("SELECT 1")
        with pytest.raises(sqlite3.OperationalError, match="database is locked"):
            other.execute("BEGIN IMMEDIATE")


def test_sqlite_file_is_closed_at_the_end(tmp_path):
    is_open = {}

    def opened(connection, record):
        is_open[id(record)] = True

    def closed(connection, record):
        is_open[id(record)] = False

    sqlalchemy.event.listen(sqlalchemy.pool.Pool, "connect", opened)
    sqlalchemy.event.listen(sqlalchemy.pool.Pool, "close", closed)
    try:
        with open_storage(f"sqlite:///{tmp_path / 'a.db'}") as storage:
            study = optuna.create_study(storage=storage)
            study.optimize(lambda trial: trial.suggest_float("x", 0, 1), n_trials=2)
    finally:
        sqlalchemy.event.remove(sqlalchemy.pool.Pool, "connect", opened)
        sqlalchemy.event.remove(sqlalchemy.pool.Pool, "close", closed)
    assert is_open and not any(is_open.values())


def test_database_that_cannot_be_created_is_an_error(pauses, tmp_path):
    (tmp_path / "no").touch()
    with pytest.raises(OSError, match="no"), open_storage(f"sqlite:///{tmp_path / 'no' / 'a.db'}"):
        pass


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
        check_storage(f"sqlite:///{path}")
    assert path.read_bytes() == before


def test_database_with_optuna_and_other_tables_is_accepted(tmp_path):
    path = tmp_path / "photos.db"
    with closing(sqlite3.connect(path)) as database:
        database.execute("create table photo (id int)")
    with open_storage(f"sqlite:///{path}"):
        pass
    before = path.read_bytes()
    check_storage(f"sqlite:///{path}")
    assert path.read_bytes() == before
    with open_storage(f"sqlite:///{path}") as found:
        assert found.get_all_studies() == []


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("sqlite.x:///a.db", r"sqlite\.x://\*\*\*: Could not parse"),
        ("none://host/a", r"none://host/a: Can't load plugin"),
    ],
)
def test_url_of_no_database_is_named(url, said, pauses):
    with pytest.raises(OSError, match=f"storage: {said}"), open_storage(url):
        pass
    with pytest.raises(OSError, match=f"storage: {said}"):
        check_storage(url)


@pytest.mark.parametrize(
    ("place", "shown"),
    [
        ("memory", "memory"),
        ("sqlite:///a.db", "sqlite:///a.db"),
        ("postgresql+psycopg://me@host/a", "postgresql+psycopg://me@host/a"),
        ("postgresql+psycopg://me:s3cr%40t@host:5/a", "postgresql+psycopg://me:***@host:5/a"),
        ("postgresql://me:s3cr@t@host:x/a", "postgresql://***"),
    ],
)
def test_a_place_is_shown_without_its_password(place, shown):
    assert shown_place(place) == shown


def test_error_contains_no_password(monkeypatch, pauses):
    def refuses(*arguments, **options):
        raise sqlalchemy.exc.OperationalError("connect", {}, Exception("no route to host"))

    monkeypatch.setattr(optuna.storages, "RDBStorage", refuses)
    with (
        pytest.raises(OSError, match=r"storage: postgresql://me:\*\*\*@host/a: .*no route to host"),
        open_storage("postgresql://me:s3cret@host/a"),
    ):
        pass
