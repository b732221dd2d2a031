"""History: the command that stores, lists and plots results of the gate."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import tyro

from stackwise.support.files import parse_json
from stackwise.support.units import byte_text, time_text

if TYPE_CHECKING:
    from stackwise.gate.history.machine import Machine
    from stackwise.gate.history.point import Series
    from stackwise.gate.history.store import Store
    from stackwise.gate.result import GateResult
    from stackwise.gate.verdict import Decision

__all__ = ["History"]


@dataclass(frozen=True, kw_only=True)
class Stored:
    """Argument of every history command."""

    store: str
    """Path of an SQLite file, or postgresql://USER:PASSWORD@HOST:PORT/DATABASE."""


@dataclass(frozen=True, kw_only=True)
class OneTest(Stored):
    """Arguments of the commands for one series."""

    test: tyro.conf.Positional[str]
    """Node id of a test, or a unique part of it."""
    metric: str = "time"
    """time, memory, ttft or tpot."""
    machine: str | None = None
    """Beginning of the machine's key; required if there are several machines."""

    @contextmanager
    def open(self) -> Iterator[tuple[Store, Series]]:
        """Yield the store and the series of the test. An exact node id is preferred to a part of another one.

        Raises:
            ValueError: no series or several series match.
        """
        from stackwise.gate.history import open_store

        with open_store(self.store, create=False) as store:
            found = store.series(machine=self.machine, test=self.test, metric=self.metric)
            found = [each for each in found if each.test == self.test] or found
            if not found:
                raise ValueError(f"test: got {self.test!r} ({self.metric}), of which there is no result")
            tests = dict.fromkeys(each.test for each in found)
            if len(tests) > 1:
                shown = ", ".join(list(tests)[:3])
                raise ValueError(
                    f"test: got {self.test!r}, which is in {len(tests)}: {shown}; allowed: a part of one"
                )
            if len(found) > 1:
                keys = ", ".join(each.machine.key for each in found)
                raise ValueError(f"machine: got {self.machine!r}; allowed: the beginning of one of {keys}")
            yield store, found[0]


@dataclass(frozen=True, kw_only=True)
class OneReport(Stored):
    """Arguments of the commands for a report of the gate."""

    report: tyro.conf.Positional[Path]
    """JSON report of the gate; only `add` stores it."""


@dataclass(frozen=True, kw_only=True)
class List(Stored):
    """List the tests and machines with results, and the newest result of each."""

    test: str | None = None
    """Only tests whose node id contains this."""
    metric: str | None = None
    """Only this metric: time, memory, ttft or tpot."""
    machine: str | None = None
    """Only machines whose key begins with this."""

    def run(self) -> int:
        """Print one line for each test and metric, under its machine."""
        from stackwise.gate.history import open_store

        with open_store(self.store, create=False) as store:
            found = store.series(machine=self.machine, test=self.test, metric=self.metric)
        if not found:
            print("no results")
        for machine in dict.fromkeys(each.machine for each in found):
            print(f"{machine.key}  {machine}")
            for each in found:
                if each.machine == machine:
                    print(f"  {_line(each)}")
        return 0


@dataclass(frozen=True, kw_only=True)
class Show(OneTest):
    """Show the results of one test and the points where they changed."""

    branch: str | None = None
    """Only results of this branch."""
    last: int = 50
    """Number of newest results to show."""

    def run(self) -> int:
        """Print one line for each result, and one line before each change point."""
        from stackwise.gate.history.change_point import change_points

        with self.open() as (store, series):
            points = store.points(
                series.machine, series.test, series.metric, branch=self.branch, last=self.last
            )
        print(f"{series.test} ({series.metric}) on {series.machine.key}, {series.machine}")
        # Log-ratios with and without a reference are not comparable. Points like the newest one are used.
        newest = points and points[-1].reference is not None
        alike = [point for point in points if (point.reference is not None) == newest]
        changes = {alike[each.index].id: each for each in change_points([p.log_ratio for p in alike])}
        for point in points:
            if point.id in changes:
                print(f"  -- another level from here on, p = {changes[point.id].p:.3g}")
            said = str(point.verdict or "-")
            print(
                f"  {point.created:%Y-%m-%d %H:%M}  {point.commit[:12]:<12}  {point.branch or '-':<12}  "
                f"{_cost(point.level, series.metric):>10}  {said:<12}  {point.standing}"
            )
        return 0


@dataclass(frozen=True, kw_only=True)
class Plot(OneTest):
    """Plot the results of one test as an SVG file, with change points and the time of the reference."""

    output: Path
    """SVG file to write."""
    branch: str | None = None
    """Only results of this branch."""

    def run(self) -> int:
        """Write the file."""
        from stackwise.gate.history.judgement import WINDOW
        from stackwise.gate.history.plot import series_svg

        with self.open() as (store, series):
            points = store.points(series.machine, series.test, series.metric, branch=self.branch, last=WINDOW)
        if not points:
            raise ValueError(f"branch: got {self.branch!r}, of which there is no result")
        self.output.write_text(series_svg(points, f"{series.test} ({series.metric})"), encoding="utf-8")
        print(f"written: {self.output}")
        return 0


@dataclass(frozen=True, kw_only=True)
class Accept(OneTest):
    """Accept the result of a commit as the new level. Later results are compared with it."""

    commit: str
    """Beginning of the commit's hash. The newest result of the commit is used."""
    reason: str
    """Reason why the new level is correct. It is stored with the result."""

    def run(self) -> int:
        """Accept the newest result of the commit, and print it."""
        with self.open() as (store, series):
            points = store.points(series.machine, series.test, series.metric)
            meant = [point for point in points if self.commit and point.commit.startswith(self.commit)]
            if not meant:
                raise ValueError(f"commit: got {self.commit!r}, of which {series.test} has no result")
            if len({point.commit for point in meant}) > 1:
                raise ValueError(f"commit: got {self.commit!r}, which several commits begin with")
            store.accept(series.machine, series.test, series.metric, meant[-1], self.reason)
        level = _cost(meant[-1].level, series.metric)
        print(f"accepted: {series.test} ({series.metric}) at {level}, {meant[-1].commit[:12]}")
        return 0


@dataclass(frozen=True, kw_only=True)
class Add(OneReport):
    """Add a JSON report of the gate (--stackwise-gate-report=FILE.json) to a history, at most once."""

    commit: str | None = None
    """Commit of head, the new version; if not given: the commit that is checked out here."""
    branch: str | None = None
    """Branch of head, the new version; if not given: the branch that is checked out here, or of the CI."""

    def run(self) -> int:
        """Add the report, and print the number of its results."""
        from stackwise.gate.git import Checkout
        from stackwise.gate.history import open_store
        from stackwise.gate.history.point import Run
        from stackwise.gate.history.record import results_of

        data = self.report.read_bytes()
        gate = _gate(self.report, data)
        here = Checkout.of(Path.cwd())
        run = Run(
            _machine_of(self.report, gate),
            commit=here.commit if self.commit is None else self.commit,
            branch=here.branch if self.branch is None else self.branch,
            created=datetime.fromtimestamp(self.report.stat().st_mtime, UTC),
            identity=hashlib.sha256(data).hexdigest(),
            notes=gate.notes,
        )
        results = results_of(gate)
        with open_store(self.store) as store:
            added = store.add(run, results)
        print(f"added: {len(results)} results" if added else f"{self.report}: is there already")
        return 0


@dataclass(frozen=True, kw_only=True)
class Judge(OneReport):
    """Compare head, the new version in a report of the gate, with the history.

    Exit codes: 0: no regression; 1: head is slower or larger; 5: the report has nothing to compare; 7:
    inconclusive.
    """

    branch: str = "main"
    """Branch whose stored results are the baseline."""
    commit: str | None = None
    """Commit of head, whose stored results are ignored; if not given: the commit that is checked out."""
    again: Path | None = None
    """Report of a second run of the same commit. If the first run found a change, the second one decides."""
    limits: str | None = None
    """Limits, such as time=2%,memory=1%,floor=50us; if not given: the defaults of the gate."""

    def run(self) -> int:
        """Print one line for each metric of each test, the worst first."""
        from stackwise.gate.git import Checkout
        from stackwise.gate.history import open_store
        from stackwise.gate.history.record import judge_run, results_of
        from stackwise.gate.limit import Limits, parse_limits
        from stackwise.gate.result import EXIT_INCONCLUSIVE, EXIT_NOTHING
        from stackwise.gate.verdict import Verdict

        limits = Limits() if self.limits is None else Limits().changed(**parse_limits(self.limits))
        gate = _gate(self.report, self.report.read_bytes())
        machine = _machine_of(self.report, gate)
        second = []
        if self.again is not None:
            again = _gate(self.again, self.again.read_bytes())
            differences = machine.differences(_machine_of(self.again, again))
            if differences:
                raise ValueError(f"{self.again}: is of another machine: {', '.join(differences)}")
            second = results_of(again)
        results = results_of(gate)
        commit = Checkout.of(Path.cwd()).commit if self.commit is None else self.commit
        with open_store(self.store, create=False) as store:
            found = judge_run(
                store, machine, results, limits, branch=self.branch, commit=commit, again=second
            )
        order = (Verdict.REGRESSED, Verdict.INCONCLUSIVE, Verdict.IMPROVED, Verdict.PASS)
        for name in sorted(found, key=lambda name: order.index(found[name].decision.verdict)):
            said = found[name].decision
            print(f"{said.verdict:<12}  {name[0]} ({name[1]}): {_change(said)}{said.reason}")
        verdicts = {each.decision.verdict for each in found.values()}
        if Verdict.REGRESSED in verdicts:
            return 1
        if not verdicts:
            print("nothing to judge: no test of the report has a metric with a limit")
            return EXIT_NOTHING
        return EXIT_INCONCLUSIVE if Verdict.INCONCLUSIVE in verdicts else 0


Action = (
    Annotated[List, tyro.conf.subcommand("list")]
    | Annotated[Show, tyro.conf.subcommand("show")]
    | Annotated[Plot, tyro.conf.subcommand("plot")]
    | Annotated[Accept, tyro.conf.subcommand("accept")]
    | Annotated[Add, tyro.conf.subcommand("add")]
    | Annotated[Judge, tyro.conf.subcommand("judge")]
)


@dataclass(frozen=True)
class History:
    """List, plot and store the results of the gate."""

    action: tyro.conf.OmitSubcommandPrefixes[Action]

    def run(self) -> int:
        """Run the action and return its exit code."""
        return self.action.run()


def _gate(path: Path, data: bytes) -> GateResult:
    from stackwise.gate.result import GateResult

    try:
        values: Any = parse_json(data)
        return GateResult.from_dict(values)
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        said = f"no {error}" if isinstance(error, KeyError) else str(error)
        raise ValueError(f"{path}: is no report of the gate: {said}") from None


def _machine_of(path: Path, gate: GateResult) -> Machine:
    from stackwise.gate.history.machine import Machine

    if not gate.environment:
        raise ValueError(f"{path}: does not say what machine it is of")
    return Machine.of(gate.environment)


def _change(decision: Decision) -> str:
    if not math.isfinite(decision.estimate):
        return ""
    interval = f" ({decision.low:+.1%} to {decision.high:+.1%})" if math.isfinite(decision.high) else ""
    return f"{decision.estimate:+.1%}{interval}; "


def _line(series: Series) -> str:
    verdict = series.last_verdict or "-"
    return (
        f"{series.test}  {series.metric}  {series.n_points} results, the last {series.last:%Y-%m-%d %H:%M} "
        f"of {series.last_commit[:12] or '-'}: {_cost(series.last_level, series.metric)}  {verdict}"
    )


def _cost(level: float, metric: str) -> str:
    return byte_text(level) if metric == "memory" else time_text(level)
