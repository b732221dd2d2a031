"""Store: history of results, in an SQLite file or a PostgreSQL database.

Every write is one transaction: a run is stored with all of its results or not at all. Two jobs that write at
the same time wait for each other. Except during a write, an SQLite store is a single file, so that a cache
can transfer it from job to job.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, Self

from sqlalchemy import func, select, update

from stackwise.gate.history import schema
from stackwise.gate.history.database import Database
from stackwise.gate.history.machine import Machine
from stackwise.gate.history.point import Baseline, Point, Result, Run, Series, Standing
from stackwise.gate.history.reference import ReferenceTime
from stackwise.gate.history.store_url import HistoryError, StoreUrl
from stackwise.gate.verdict import Verdict
from stackwise.support.arguments import check_sizes, require

__all__ = ["HistoryError", "Store"]

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


class Store:
    """History of results.

    Args:
        place: path of an SQLite file, or a URL; see `StoreUrl`.
        create: True to create a missing history.
        timeout_seconds: maximum wait for another writer, or for a server.

    Raises:
        ValueError: `place` is not the path or URL of a store.
        HistoryError: the store cannot be opened, is not a history, is damaged, or has tables of another
            version. It is not changed.
    """

    def __init__(self, place: str | Path, *, create: bool = True, timeout_seconds: float = 60.0) -> None:
        self._database = Database(StoreUrl.of(place), create=create, timeout_seconds=timeout_seconds)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"Store({self._database.shown!r})"

    def close(self) -> None:
        """Close the store."""
        self._database.close()

    def add(self, run: Run, results: Sequence[Result]) -> bool:
        """Store a run with all its results, in one transaction.

        Args:
            run: the run.
            results: results of the run, each metric of each test once.

        Returns:
            True if the run was stored, False if it was stored before.

        Raises:
            ValueError: a metric of a test occurs twice.
            HistoryError: the run cannot be written. No part of it is then stored.
        """
        names = [(each.test, each.metric) for each in results]
        twice = [name for name, count in Counter(names).items() if count > 1]
        require(not twice, "results", twice, "each metric of each test once")
        with self._database.writing() as connection:
            machine_id = self._machine(connection, run.machine)
            values = {
                "identity": run.identity,
                "machine_id": machine_id,
                "commit_id": run.commit,
                "branch": run.branch,
                "created": _microseconds(run.created),
                "notes": json.dumps(run.notes),
            }
            run_id = self._database.enter(connection, schema.runs, values, ["identity"])
            if run_id is None:
                return False
            series = self._series_ids(connection, machine_id, names)
            rows = [
                {
                    "series_id": series[each.test, each.metric],
                    "run_id": run_id,
                    "branch": run.branch,
                    "created": values["created"],
                    "level": each.level,
                    "log_ratio": each.log_ratio,
                    "reference_gemm": each.reference and each.reference.gemm,
                    "reference_copy": each.reference and each.reference.copy,
                    "verdict": each.verdict and str(each.verdict),
                    "decision": _json(each.decision),
                    "standing": str(each.standing or Standing.of(each.verdict)),
                }
                for each in results
            ]
            if rows:
                connection.execute(schema.results.insert(), rows)
        return True

    def series(
        self, *, machine: str | None = None, test: str | None = None, metric: str | None = None
    ) -> list[Series]:
        """Return the series, sorted by test, metric and machine.

        Args:
            machine: prefix of a machine's key; None: all machines.
            test: part of the node ID; None: all tests.
            metric: name of the metric; None: all metrics.
        """
        s, m, r, runs = schema.series, schema.machines, schema.results, schema.runs
        newest = (
            select(r.c.id)
            .where(r.c.series_id == s.c.id)
            .order_by(r.c.created.desc(), r.c.id.desc())
            .limit(1)
            .correlate(s)
            .scalar_subquery()
        )
        count = select(func.count()).where(r.c.series_id == s.c.id).correlate(s).scalar_subquery()
        query = (
            select(m.c.facts, s.c.test, s.c.metric, count)
            .add_columns(r.c.created, runs.c.commit_id, r.c.level, r.c.verdict)
            .join_from(s, m, m.c.id == s.c.machine_id)
            .join(r, r.c.id == newest)
            .join(runs, runs.c.id == r.c.run_id)
            .order_by(s.c.test, s.c.metric, s.c.id)
        )
        if machine is not None:
            query = query.where(m.c.key.startswith(machine, autoescape=True))
        if test is not None:
            query = query.where(s.c.test.contains(test, autoescape=True))
        if metric is not None:
            query = query.where(s.c.metric == metric)
        with self._database.reading() as connection:
            return [
                Series(
                    Machine(json.loads(facts)), name, kind, n, _time(last), commit, level, _verdict(verdict)
                )
                for facts, name, kind, n, last, commit, level, verdict in connection.execute(query)
            ]

    def points(
        self,
        machine: Machine,
        test: str,
        metric: str,
        *,
        branch: str | None = None,
        counted: bool = False,
        last: int | None = None,
    ) -> list[Point]:
        """Return the results of one metric of one test on one kind of machine, oldest first.

        Args:
            machine: kind of machine. Results of another kind are another series.
            test: node ID of the test.
            metric: name of the metric.
            branch: branch of the runs; None: all branches.
            counted: True for only the results by which later ones are judged: from the branch's baseline to
                the newest accepted result, without excluded results.
            last: maximum number of results, the newest ones; None: all.
        """
        r, runs = schema.results, schema.runs
        if last is not None:
            check_sizes(last=last)
        query = self._of_series(
            select(r.c.id, r.c.created, runs.c.commit_id, r.c.branch, r.c.level, r.c.log_ratio)
            .add_columns(r.c.reference_gemm, r.c.reference_copy, r.c.verdict, r.c.standing)
            .join_from(r, runs, runs.c.id == r.c.run_id),
            machine,
            test,
            metric,
        )
        if branch is not None:
            query = query.where(r.c.branch == branch)
        if counted:
            require(branch is not None, "branch", branch, "the one whose results count")
            query = self._counted(query)
        query = query.order_by(r.c.created.desc(), r.c.id.desc()).limit(last)
        with self._database.reading() as connection:
            rows = connection.execute(query).all()
            return [
                Point(
                    id=row.id,
                    created=_time(row.created),
                    commit=row.commit_id,
                    branch=row.branch,
                    level=row.level,
                    log_ratio=row.log_ratio,
                    reference=_reference(row.reference_gemm, row.reference_copy),
                    verdict=_verdict(row.verdict),
                    standing=Standing(row.standing),
                )
                for row in reversed(rows)
            ]

    def references(self, machine: Machine, *, last: int = 64) -> list[ReferenceTime]:
        """Return the mean reference time of each of the newest runs of a machine, oldest first.

        Args:
            machine: kind of machine.
            last: maximum number of runs.
        """
        check_sizes(last=last)
        r, m, runs = schema.results, schema.machines, schema.runs
        newest = (
            select(runs.c.id)
            .join_from(runs, m, m.c.id == runs.c.machine_id)
            .where(m.c.key == machine.key)
            .order_by(runs.c.created.desc(), runs.c.id.desc())
            .limit(last)
        )
        query = (
            select(func.avg(r.c.reference_gemm), func.avg(r.c.reference_copy))
            .where(r.c.run_id.in_(newest.scalar_subquery()), r.c.reference_gemm.is_not(None))
            .group_by(r.c.run_id)
            .order_by(func.max(r.c.created), r.c.run_id)
        )
        with self._database.reading() as connection:
            return [ReferenceTime(gemm, copy) for gemm, copy in connection.execute(query)]

    def baseline(self, machine: Machine, test: str, metric: str, branch: str) -> Baseline | None:
        """Return the baseline of a series on a branch; None: all of its results are used."""
        b, s, m = schema.baselines, schema.series, schema.machines
        query = (
            select(b.c.since, b.c.commit_id, b.c.reason)
            .join_from(b, s, s.c.id == b.c.series_id)
            .join(m, m.c.id == s.c.machine_id)
            .where(m.c.key == machine.key, s.c.digest == _digest(test, metric))
            .where(b.c.branch == branch)
        )
        with self._database.reading() as connection:
            row = connection.execute(query).one_or_none()
            return None if row is None else Baseline(_time(row[0]), row[1], row[2])

    def accept(self, machine: Machine, test: str, metric: str, point: Point, reason: str) -> None:
        """Accept a point regardless of its verdict. Later results of its branch are judged from it on.

        Args:
            machine: machine of the series.
            test: node ID of the test.
            metric: name of the metric.
            point: point of the series.
            reason: reason for later readers.

        Raises:
            ValueError: a point of another series, or no reason.
        """
        require(bool(reason.strip()), "reason", reason, "why the new level is right")
        r, b = schema.results, schema.baselines
        with self._database.writing() as connection:
            owner = self._of_series(select(r.c.series_id), machine, test, metric).where(r.c.id == point.id)
            series_id = connection.execute(owner).scalar_one_or_none()
            require(
                series_id is not None, "point", point.id, f"a result of {test} ({metric}) on that machine"
            )
            connection.execute(update(r).where(r.c.id == point.id).values(standing=str(Standing.ACCEPTED)))
            place = {"series_id": series_id, "branch": point.branch}
            values = {
                "since": _microseconds(point.created),
                "commit_id": point.commit,
                "reason": reason,
                "set_at": _microseconds(datetime.now(UTC)),
            }
            found = connection.execute(
                update(b).where(*(b.c[name] == value for name, value in place.items())).values(**values)
            )
            if not found.rowcount:
                connection.execute(b.insert().values(**place, **values))

    def _counted(self, query: Any) -> Any:
        r, b, other = schema.results, schema.baselines, schema.results.alias()
        since = (
            select(b.c.since)
            .where(b.c.series_id == r.c.series_id, b.c.branch == r.c.branch)
            .correlate(r)
            .scalar_subquery()
        )
        newest = (
            select(func.max(other.c.created))
            .where(other.c.series_id == r.c.series_id, other.c.branch == r.c.branch)
            .where(other.c.standing == str(Standing.ACCEPTED))
            .correlate(r)
            .scalar_subquery()
        )
        return query.where(
            r.c.standing != str(Standing.EXCLUDED),
            r.c.created >= func.coalesce(since, r.c.created),
            r.c.created <= newest,
        )

    def _of_series(self, query: Any, machine: Machine, test: str, metric: str) -> Any:
        s, m = schema.series, schema.machines
        number = (
            select(s.c.id)
            .join_from(s, m, m.c.id == s.c.machine_id)
            .where(m.c.key == machine.key, s.c.digest == _digest(test, metric))
            .scalar_subquery()
        )
        return query.where(schema.results.c.series_id == number)

    def _machine(self, connection: Any, machine: Machine) -> int:
        values = {"key": machine.key, "facts": json.dumps(machine.facts, sort_keys=True)}
        entered = self._database.enter(connection, schema.machines, values, ["key"])
        if entered is not None:
            return entered
        query = select(schema.machines.c.id).where(schema.machines.c.key == machine.key)
        return int(connection.execute(query).scalar_one())

    def _series_ids(
        self, connection: Any, machine_id: int, names: Sequence[tuple[str, str]]
    ) -> dict[tuple[str, str], int]:
        """Return the IDs of series. Insert new series."""
        table = schema.series
        query = select(table.c.digest, table.c.id).where(table.c.machine_id == machine_id)
        known: dict[str, int] = {row.digest: row.id for row in connection.execute(query)}
        found = {}
        # Sorted, so that two jobs with the same new tests do not block each other.
        for test, metric in sorted(names):
            digest = _digest(test, metric)
            if digest not in known:
                values = {"machine_id": machine_id, "digest": digest, "test": test, "metric": metric}
                entered = self._database.enter(connection, table, values, ["machine_id", "digest"])
                # PostgreSQL has waited for the commit of the other job, so its row is visible now.
                again = query.where(table.c.digest == digest)
                known[digest] = entered if entered is not None else connection.execute(again).one().id
            found[test, metric] = known[digest]
        return found


def _digest(*parts: str) -> str:
    return hashlib.sha256("\0".join(parts).encode("utf-8", "surrogatepass")).hexdigest()


def _microseconds(time: datetime) -> int:
    return (time - _EPOCH) // timedelta(microseconds=1)


def _time(microseconds: int) -> datetime:
    return _EPOCH + timedelta(microseconds=microseconds)


def _verdict(text: str | None) -> Verdict | None:
    return None if text is None else Verdict(text)


def _reference(gemm: float | None, copy: float | None) -> ReferenceTime | None:
    return None if gemm is None or copy is None else ReferenceTime(gemm, copy)


def _json(decision: Mapping[str, Any] | None) -> str | None:
    return None if decision is None else json.dumps(dict(decision), allow_nan=False)
