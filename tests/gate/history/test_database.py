"""What is no history is refused and left as it is."""

import sqlite3
import sys
from contextlib import closing

import pytest

from stackwise.gate.history import HistoryError, open_store
from stackwise.gate.history.store import Store


def test_a_file_of_something_else_is_left_alone(tmp_path):
    path = tmp_path / "notes.db"
    path.write_bytes(b"Dear diary, " * 1000)
    with pytest.raises(HistoryError, match=r"notes.db: file is not a database"):
        Store(path)
    assert path.read_bytes() == b"Dear diary, " * 1000


def test_a_database_of_something_else_is_left_alone(tmp_path):
    path = tmp_path / "photos.db"
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("CREATE TABLE photo (name TEXT)")
        connection.commit()
    before = path.read_bytes()
    with pytest.raises(HistoryError, match=r"photos.db: is no history of stackwise: it has the tables photo"):
        Store(path)
    assert path.read_bytes() == before


@pytest.mark.parametrize("keep", [0.3, 0.9])
def test_a_file_that_was_cut_off_is_told(tmp_path, make_run, make_result, keep):
    path = tmp_path / "history.db"
    with Store(path) as store:
        for number in range(20):
            store.add(make_run(number), [make_result(test=f"test[{'x' * 4000}{number}]")])
    whole = path.read_bytes()
    cut = whole[: int(len(whole) * keep)]
    path.write_bytes(cut)
    with pytest.raises(HistoryError, match=r"history.db: database disk image is malformed"):
        Store(path)
    assert path.read_bytes() == cut


@pytest.fixture
def filled(tmp_path, make_run, make_result):
    """The file of a history of 20 runs."""
    path = tmp_path / "history.db"
    with Store(path) as store:
        for number in range(20):
            store.add(make_run(number), [make_result(), make_result(metric="memory")])
    return path


def everything(path):
    """All that a history has, read through its public questions."""
    with Store(path, create=False) as store:
        return [store.points(each.machine, each.test, each.metric) for each in store.series()]


def test_damaged_page_never_returns_fewer_rows(filled):
    """Bytes of each part of the file are overwritten, one part at a time."""
    whole, errors = filled.read_bytes(), []
    assert [len(points) for points in everything(filled)] == [20, 20]
    for start in range(100, len(whole) - 64, len(whole) // 60):
        filled.write_bytes(whole[:start] + b"\xff" * 64 + whole[start + 64 :])
        try:
            assert [len(points) for points in everything(filled)] == [20, 20]
        except HistoryError as error:
            errors.append(str(error))
    assert len(errors) > 3
    assert all(error.startswith(f"{filled}: ") for error in errors)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("UPDATE stackwise_result SET level = 'fast' WHERE id = 7", "must be real number, not str"),
        ("UPDATE stackwise_result SET level = -1.0 WHERE id = 7", "level of result 7: got -1.0; allowed"),
        ("UPDATE stackwise_result SET log_ratio = 9e999 WHERE id = 7", "log-ratio of result 7: got inf"),
        (
            "UPDATE stackwise_result SET standing = 'sitting' WHERE id = 7",
            "'sitting' is not a valid",
        ),
        ("UPDATE stackwise_result SET verdict = 'FINE' WHERE id = 7", "'FINE' is not a valid Verdict"),
        ("UPDATE stackwise_machine SET facts = '{'", "Expecting property name"),
    ],
)
def test_damaged_value_is_an_error_that_names_the_file(filled, change, message):
    with closing(sqlite3.connect(filled)) as connection:
        connection.execute(change)
        connection.commit()
    with pytest.raises(HistoryError, match=message) as told:
        everything(filled)
    assert str(told.value).startswith(f"{filled}: is damaged: ")


@pytest.mark.parametrize("versions", [(3,), (), (1, 2)], ids=["newer", "none", "two"])
def test_another_version_is_refused(tmp_path, versions):
    path = tmp_path / "history.db"
    Store(path).close()
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("DELETE FROM stackwise_history")
        connection.executemany("INSERT INTO stackwise_history VALUES (?)", [(each,) for each in versions])
        connection.commit()
    before = path.read_bytes()
    shown = ", ".join(map(str, versions)) or "unknown"
    with pytest.raises(HistoryError, match=f"has tables of version {shown}; this stackwise reads version 2"):
        Store(path)
    assert path.read_bytes() == before


def test_nothing_is_made_where_it_is_only_looked_for(tmp_path):
    with pytest.raises(HistoryError, match="there is no history"):
        Store(tmp_path / "history.db", create=False)
    (tmp_path / "empty.db").touch()
    with pytest.raises(HistoryError, match="there is no history"):
        Store(tmp_path / "empty.db", create=False)
    assert (tmp_path / "empty.db").read_bytes() == b"" and not (tmp_path / "history.db").exists()


def test_an_empty_file_becomes_a_history(tmp_path):
    (tmp_path / "empty.db").touch()
    with Store(tmp_path / "empty.db") as store:
        assert store.series() == []


def test_a_folder_that_is_not_there_is_named(tmp_path):
    with pytest.raises(HistoryError, match="there is no folder"):
        Store(tmp_path / "none" / "history.db")


def test_a_server_that_does_not_answer_is_told_without_the_password():
    with pytest.raises(HistoryError, match=r"postgresql://me:\*\*\*@localhost:1/bench: ") as told:
        Store("postgresql://me:s3cr%2Ft@localhost:1/bench?sslpassword=hidden", timeout_seconds=1)
    assert all(each not in str(told.value) for each in ("s3cr", "hidden"))
    assert told.value.__suppress_context__


def test_a_missing_sqlalchemy_is_told(monkeypatch, tmp_path):
    for name in [name for name in sys.modules if name.startswith("stackwise.gate.history.store")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "sqlalchemy", None)
    with pytest.raises(ValueError, match=r"needs SQLAlchemy: pip install 'stackwise\[history\]'"):
        open_store(tmp_path / "history.db")
