"""Store URLs: what is taken for one, and that nobody reads the password."""

from pathlib import Path

import pytest

from stackwise.gate.history.store_url import StoreUrl

SECRET = "p@ss/w:rd#1"
WRITTEN = "p%40ss%2Fw%3Ard%231"


@pytest.mark.parametrize(
    "text, path",
    [
        ("history.db", Path("history.db")),
        ("runs/a b.db", Path("runs/a b.db")),
        ("sqlite:///history.db", Path("history.db")),
        ("sqlite:////tmp/history.db", Path("/tmp/history.db")),
        (Path("x:y"), Path("x:y")),
        ("runs: all/history.db", Path("runs: all/history.db")),
    ],
    ids=str,
)
def test_files(text, path):
    where = StoreUrl.of(text)
    assert (where.path, where.shown, where.url.database) == (path, str(path), str(path))


@pytest.mark.parametrize("scheme", ["postgresql", "postgresql+psycopg", "postgres"])
def test_a_server_is_shown_without_what_is_secret(scheme):
    where = StoreUrl.of(
        f"{scheme}://me:{WRITTEN}@db.example:5433/bench?sslpassword=hidden&application_name=ci"
    )
    assert where.path is None
    assert where.shown == "postgresql://me:***@db.example:5433/bench"
    assert where.url.password == SECRET and where.url.drivername == "postgresql+psycopg"
    said = f"cannot log in with {SECRET} ({WRITTEN}), nor hidden, as ci"
    assert where.clean(said) == "cannot log in with *** (***), nor ***, as ci"
    assert SECRET not in repr(where) and WRITTEN not in repr(where) and "hidden" not in repr(where)


@pytest.mark.parametrize(
    "text",
    [
        "",
        ".",
        ":memory:",
        "sqlite://",
        "sqlite+aiosqlite:///x.db",
        "mysql://me:word@host/bench",
        "postgresql+psycopg2://me:word@host/bench",
        "postgresql://me:word@host",
        "postgresql://me:wo@word@host/bench",
        "postgresql://me:wo/a@word@host/bench",
        "postgresql://me:wo@rd:word/x@host:word/bench",
        "://word",
        "postgresql:/me:word@host/bench",
        "postgres:me:word@host/bench",
    ],
    ids=str,
)
def test_others_are_refused_without_repeating_them(text):
    with pytest.raises(ValueError, match="store: got") as told:
        StoreUrl.of(text)
    assert "word" not in str(told.value).replace("PASSWORD", "").replace("a password", "")
