"""The store on a real PostgreSQL server: of the URL in STACKWISE_TEST_POSTGRESQL, or one that is started."""

import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time
import uuid
from pathlib import Path

import pytest
from sqlalchemy import create_engine, text
from sqlalchemy.pool import NullPool

from stackwise.gate.history import HistoryError
from stackwise.gate.history.reference import ReferenceTime
from stackwise.gate.history.store import Store
from stackwise.gate.history.store_url import StoreUrl
from stackwise.gate.verdict import Verdict
from tests.forked import HANG_SECONDS

pytestmark = pytest.mark.slow
TEST = "bench/test_a.py::test_step"
PASSWORD = "s3cr/t @word"


def _binary(name):
    found = shutil.which(name)
    return found or next((str(each) for each in Path("/usr/lib/postgresql").glob(f"*/bin/{name}")), None)


@pytest.fixture(scope="module")
def server():
    """A URL up to the database's name."""
    given = os.environ.get("STACKWISE_TEST_POSTGRESQL")
    if given:
        yield given.rstrip("/")
        return
    initdb, postgres = _binary("initdb"), _binary("postgres")
    if initdb is None or postgres is None:
        pytest.skip("no PostgreSQL server: neither STACKWISE_TEST_POSTGRESQL nor initdb and postgres")
    # The server refuses to run as root; pytest's own folders are closed to others.
    user = {"user": "postgres", "group": "postgres", "extra_groups": []} if os.geteuid() == 0 else {}
    folder = Path(tempfile.mkdtemp(prefix="stackwise-pg-"))
    try:
        (folder / "password").write_text(PASSWORD)
        folder.chmod(0o755)
        (folder / "data").mkdir()
        if user:
            shutil.chown(folder / "data", "postgres", "postgres")
        options = ["-U", "me", "-A", "scram-sha-256", "--no-sync", "-E", "UTF8", "--locale=C"]
        command = [initdb, "-D", folder / "data", "--pwfile", folder / "password", *options]
        subprocess.run(command, check=True, capture_output=True, cwd=folder, **user)
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        options = ["-c", "listen_addresses=127.0.0.1", "-c", "unix_socket_directories=", "-c", "fsync=off"]
        command = [postgres, "-D", folder / "data", "-p", str(port), *options]
        with (folder / "log").open("wb") as log:
            process = subprocess.Popen(command, stdout=log, stderr=log, cwd=folder, **user)
        try:
            url = f"postgresql://me:s3cr%2Ft%20%40word@127.0.0.1:{port}"
            _wait_for(url, process, folder / "log")
            yield url
        finally:
            process.send_signal(signal.SIGINT)  # does not wait for clients
            process.wait(HANG_SECONDS)
    finally:
        shutil.rmtree(folder)


def _wait_for(url, process, log):
    for _ in range(10 * HANG_SECONDS):
        assert process.poll() is None, log.read_text()
        try:
            with _admin(url).connect():
                return
        except Exception:
            time.sleep(0.1)
    raise AssertionError(log.read_text())


def _admin(url):
    return create_engine(StoreUrl.of(f"{url}/postgres").url, isolation_level="AUTOCOMMIT", poolclass=NullPool)


@pytest.fixture
def database(server):
    """The URL of a new, empty database."""
    name = f"bench_{uuid.uuid4().hex[:12]}"
    with _admin(server).connect() as connection:
        connection.execute(text(f"CREATE DATABASE {name}"))
    yield f"{server}/{name}"
    with _admin(server).connect() as connection:
        connection.execute(text(f"DROP DATABASE {name} WITH (FORCE)"))


def test_what_is_put_in_comes_out(database, make_run, make_result, machine):
    verdicts = [Verdict.PASS, Verdict.INCONCLUSIVE, Verdict.REGRESSED, Verdict.PASS, Verdict.REGRESSED]
    with Store(database) as store:
        for number, verdict in enumerate(verdicts):
            result = make_result(float(number), verdict=verdict, decision={"a": 1})
            assert store.add(make_run(number), [result, make_result(metric="memory", reference=False)])
        assert not store.add(make_run(0), [make_result()])
    with Store(database, create=False) as store:
        points = store.points(machine, TEST, "time")
        assert [point.log_ratio for point in points] == [0.0, 1.0, 2.0, 3.0, 4.0]
        assert [point.verdict for point in points] == verdicts
        counted = store.points(machine, TEST, "time", branch="main", counted=True)
        assert [point.log_ratio for point in counted] == [0.0, 1.0, 3.0]
        store.accept(machine, TEST, "time", points[4], "more layers")
        store.accept(machine, TEST, "time", points[4], "many more layers")
        counted = store.points(machine, TEST, "time", branch="main", counted=True, last=3)
        assert [point.log_ratio for point in counted] == [4.0]
        assert store.baseline(machine, TEST, "time", "main").reason == "many more layers"
        assert store.references(machine, last=3) == [ReferenceTime(1e-3, 4e-3)] * 3
        found = [
            (series.metric, series.n_points, series.last_verdict) for series in store.series(test="step")
        ]
        assert found == [("memory", 5, None), ("time", 5, Verdict.REGRESSED)]


def test_a_database_may_be_shared_with_others(database, make_run, make_result):
    engine = create_engine(StoreUrl.of(database).url, poolclass=NullPool)
    with engine.begin() as connection:
        connection.execute(text("CREATE TABLE photo (name TEXT)"))
    with pytest.raises(HistoryError, match="there is no history"):
        Store(database, create=False)
    with Store(database) as store:
        store.add(make_run(), [make_result(test="x" * 50_000)])
    with engine.begin() as connection:
        connection.execute(text("UPDATE stackwise_history SET schema_version = 7"))
    with pytest.raises(HistoryError, match="has tables of version 7; this stackwise reads version 2"):
        Store(database)


def test_jobs_that_write_at_the_same_time_wait_for_each_other(database, write_at_once):
    write_at_once(database)
    with Store(database, create=False) as store:
        assert [series.n_points for series in store.series()] == [24 - 3 * i for i in range(8)]


@pytest.mark.parametrize("wrong", ["password", "database"])
def test_nobody_reads_the_password_in_an_error(server, wrong):
    if wrong == "password":
        url = server.replace("word@", "w0rd@") + "/postgres"
    else:
        url = f"{server}/none?password={'s3cr%2Ft%20%40word'}"
    with pytest.raises(HistoryError, match=r"postgresql://me:\*\*\*@127.0.0.1:\d+/\w+: ") as told:
        Store(url, timeout_seconds=5)
    assert all(each not in str(told.value) for each in ("s3cr", "word@", "w0rd"))


def test_what_the_server_refuses_is_told(database, make_run, make_result):
    with Store(database) as store:
        with pytest.raises(HistoryError, match="NUL"):
            store.add(make_run(), [make_result(test="a\0b")])
        assert store.series() == []
