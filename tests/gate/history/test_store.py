"""The store: what is put in comes out, by its machine, in its order, whole or not at all."""

import sqlite3
from contextlib import closing
from datetime import UTC, datetime, timedelta, timezone

import pytest

from stackwise.gate.history import HistoryError
from stackwise.gate.history.machine import Machine
from stackwise.gate.history.point import Result, Standing
from stackwise.gate.history.reference import ReferenceTime
from stackwise.gate.history.store import Store
from stackwise.gate.verdict import Verdict

TEST = "bench/test_a.py::test_step"


@pytest.fixture
def store(tmp_path):
    with Store(tmp_path / "history.db") as store:
        yield store


def test_what_is_put_in_comes_out(store, make_run, machine):
    reference = ReferenceTime(1e-3, 4e-3)
    result = Result("a.py::test[é]", "time", 0.5, -1.25, reference, Verdict.PASS, {"verdict": "PASS"})
    assert store.add(make_run(3), [result])
    [point] = store.points(machine, "a.py::test[é]", "time")
    assert (point.commit, point.branch) == ("0003" * 10, "main")
    assert point.created == datetime(2026, 1, 4, tzinfo=UTC)
    assert (point.level, point.log_ratio, point.reference) == (0.5, -1.25, reference)
    assert (point.verdict, point.standing) == (Verdict.PASS, Standing.ACCEPTED)


def test_time_zones_are_one_time(store, make_run, make_result, machine):
    local = datetime(2026, 5, 1, 1, 30, 0, 123456, tzinfo=timezone(timedelta(hours=5, minutes=30)))
    store.add(make_run(created=local), [make_result()])
    [point] = store.points(machine, TEST, "time")
    assert point.created == local and point.created.tzinfo is UTC


def test_points_are_in_the_order_of_time_and_the_last_are_the_newest(store, make_run, make_result, machine):
    for number in (3, 1, 2):
        store.add(make_run(number), [make_result(float(number))])
    assert [point.log_ratio for point in store.points(machine, TEST, "time")] == [1.0, 2.0, 3.0]
    assert [point.log_ratio for point in store.points(machine, TEST, "time", last=2)] == [2.0, 3.0]


def test_a_run_is_stored_once(store, make_run, make_result, machine):
    assert store.add(make_run(1), [make_result()])
    assert not store.add(make_run(1), [make_result(9.0)])
    assert [point.log_ratio for point in store.points(machine, TEST, "time")] == [0.0]


def test_a_run_is_there_whole_or_not_at_all(store, make_run, make_result, machine):
    broken = make_result(test="later")
    object.__setattr__(broken, "decision", {"reason": object()})
    with pytest.raises(TypeError):
        store.add(make_run(1), [make_result(), broken])
    assert store.series() == []
    assert store.add(make_run(1), [make_result()])


def test_a_metric_twice_is_refused(store, make_run, make_result):
    with pytest.raises(ValueError, match=r"results: got \[\('bench/test_a.py::test_step', 'time'\)\]"):
        store.add(make_run(), [make_result(), make_result(1.0)])


def test_another_machine_is_another_series(store, make_run, make_result, machine, fingerprint):
    other = Machine.of(fingerprint | {"torch": "2.12.0"})
    store.add(make_run(1), [make_result(1.0)])
    store.add(make_run(2, machine=other), [make_result(2.0, reference=ReferenceTime(7.0, 7.0))])
    assert [point.log_ratio for point in store.points(machine, TEST, "time")] == [1.0]
    assert [point.log_ratio for point in store.points(other, TEST, "time")] == [2.0]
    assert store.references(machine) == [ReferenceTime(1e-3, 4e-3)]


def test_series_are_listed_with_their_newest(store, make_run, make_result, machine):
    store.add(make_run(1), [make_result(), make_result(metric="memory", reference=False)])
    store.add(make_run(2), [make_result(verdict=Verdict.REGRESSED)])
    store.add(make_run(0), [make_result(test="another_100%")])
    found = [(s.test, s.metric, s.n_points, s.last_commit[:4], s.last_verdict) for s in store.series()]
    assert found == [
        ("another_100%", "time", 1, "0000", None),
        (TEST, "memory", 1, "0001", None),
        (TEST, "time", 2, "0002", Verdict.REGRESSED),
    ]
    assert [s.test for s in store.series(test="0%")] == ["another_100%"]
    assert len(store.series(metric="memory")) == 1
    assert len(store.series(machine=machine.key[:5])) == 3
    assert store.series(machine="%") == []


def test_which_points_count(store, make_run, make_result, machine):
    verdicts = [
        Verdict.PASS,
        Verdict.INCONCLUSIVE,  # counts, since a later one passed
        Verdict.REGRESSED,
        Verdict.IMPROVED,
        Verdict.PASS,
        Verdict.INCONCLUSIVE,
        Verdict.REGRESSED,
    ]
    for number, verdict in enumerate(verdicts):
        store.add(make_run(number), [make_result(float(number), verdict=verdict)])
    store.add(make_run(9, branch="feature"), [make_result(9.0, verdict=Verdict.PASS)])

    def counted(branch="main"):
        return [p.log_ratio for p in store.points(machine, TEST, "time", branch=branch, counted=True)]

    assert counted() == [0.0, 1.0, 4.0]
    assert counted("feature") == [9.0]
    assert counted("none") == []
    assert store.baseline(machine, TEST, "time", "main") is None

    slower = store.points(machine, TEST, "time", branch="main")[6]
    store.accept(machine, TEST, "time", slower, "more layers")
    assert counted() == [6.0]
    assert counted("feature") == [9.0]
    found = store.baseline(machine, TEST, "time", "main")
    assert (found.since, found.commit, found.reason) == (slower.created, "0006" * 10, "more layers")

    first = store.points(machine, TEST, "time", branch="main")[2]
    store.accept(machine, TEST, "time", first, "after all")
    assert counted() == [2.0, 4.0, 5.0, 6.0]


def test_counting_takes_a_branch(store, machine):
    with pytest.raises(ValueError, match="branch: got None"):
        store.points(machine, TEST, "time", counted=True)


def test_accepting_takes_a_reason_and_a_point_of_the_series(store, make_run, make_result, machine):
    store.add(make_run(), [make_result(), make_result(metric="ttft")])
    [other] = store.points(machine, TEST, "ttft")
    with pytest.raises(ValueError, match="reason: got ' '"):
        store.accept(machine, TEST, "ttft", other, " ")
    with pytest.raises(ValueError, match="point: got 2; allowed: a result of"):
        store.accept(machine, TEST, "time", other, "why not")


def test_references_are_means_of_runs(store, make_run, make_result, machine):
    for number in range(3):
        references = [ReferenceTime(1.0 + number, 2.0), ReferenceTime(3.0 + number, 4.0)]
        store.add(make_run(number), [make_result(test=str(i), reference=r) for i, r in enumerate(references)])
    store.add(make_run(5), [make_result(reference=False)])
    assert store.references(machine) == [ReferenceTime(2.0 + number, 3.0) for number in range(3)]
    assert store.references(machine, last=2) == [ReferenceTime(4.0, 3.0)]


def test_a_node_id_may_be_long(store, make_run, make_result, machine):
    name = "test[" + "x" * 100_000 + "]"
    store.add(make_run(), [make_result(test=name)])
    assert len(store.points(machine, name, "time")) == 1


def test_it_is_one_file_when_nobody_writes(store, make_run, make_result, tmp_path):
    store.add(make_run(), [make_result()])
    assert [path.name for path in tmp_path.iterdir()] == ["history.db"]


def test_the_same_store_opened_again(tmp_path, make_run, make_result, machine):
    with Store(tmp_path / "history.db") as first:
        first.add(make_run(), [make_result()])
    with Store(f"sqlite:///{tmp_path}/history.db", create=False) as again:
        assert len(again.points(machine, TEST, "time")) == 1


def test_jobs_that_write_at_the_same_time_wait_for_each_other(tmp_path, write_at_once):
    place = tmp_path / "history.db"
    write_at_once(place)
    with Store(place, create=False) as store:
        assert [series.n_points for series in store.series()] == [24 - 3 * i for i in range(8)]


def test_a_writer_waits_no_longer_than_it_was_told(tmp_path, make_run, make_result):
    path = tmp_path / "history.db"
    with Store(path, timeout_seconds=0.05) as store, closing(sqlite3.connect(path)) as other:
        other.execute("BEGIN EXCLUSIVE")
        with pytest.raises(HistoryError, match=r"history.db: database is locked"):
            store.add(make_run(), [make_result()])
        other.rollback()
        assert store.add(make_run(), [make_result()])
