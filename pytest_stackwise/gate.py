"""Gate as tests: each benchmark passes, fails or is inconclusive, by its comparison with the base.

The benchmarks run in processes of both sides, see `stackwise.gate`. In this run, the call of a test only
reports its result, so that JUnit, xfail and -x apply to it.
"""

from __future__ import annotations

import argparse
import math
import os
import shlex
import shutil
import signal
import sys
import warnings
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import pytest

from pytest_stackwise import benchmark_items, gate_judges, markers, options, records

if TYPE_CHECKING:
    from stackwise.gate.result import GateResult, TestResult
    from stackwise.gate.round import Sampling
    from stackwise.gate.session import Launch, Progress
    from stackwise.gate.tree import Renamed, Tree

__all__ = ["GateSetupError", "GateWarning", "RegressionError", "create"]

_CALLABLE = "callable"
# Markers with absolute limits. `throughput` applies them if it measures without the gate.
_ABSOLUTE = ("min_tokens_per_second", "max_latency", "max_memory")
# Options of the user's run that the sides do not get, by their destinations in argparse.
_OWN = frozenset(
    {
        "stackwise_against",
        "stackwise_build",
        "stackwise_head",
        "stackwise_history",
        "stackwise_missing",
        "stackwise_report",
        "xmlpath",
        "numprocesses",
        "dist",
        "distload",
        "tx",
        "maxfail",
        "basetemp",
        "cacheclear",
        "lf",
        "failedfirst",
        "newfirst",
        "stepwise",
        "stepwise_skip",
        "stepwise_reset",
        "collectonly",
        "setuponly",
        "setupplan",
        "verbose",
        "tbstyle",
        "reportchars",
        "trace",
        "memray",
        "usepdb",
        "usepdb_cls",
        "file_or_dir",
    }
)
_OWN_FAMILY = "stackwise_gate"

_LINE_PAUSE = 5.0  # seconds between two lines of progress


class RegressionError(pytest.fail.Exception):  # type: ignore[name-defined, misc]
    """Regression: a test costs more than its limit allows.

    Attributes:
        short: change and limit, for pytest's short summary.
    """

    def __init__(self, text: str, short: str = "") -> None:
        super().__init__(text, pytrace=False)
        self.short = short or text


class GateSetupError(pytest.fail.Exception):  # type: ignore[name-defined, misc]
    """Set-up error: a test cannot be measured until the test, the trees or the environment are changed.

    Attributes:
        short: the reason on one line, for pytest's short summary.
    """

    def __init__(self, text: str, short: str = "") -> None:
        super().__init__(text, pytrace=False)
        self.short = short or text


class GateWarning(pytest.PytestWarning):
    """Warning about a test that exists on one side only, so that there is no comparison."""


def create(config: pytest.Config) -> Gate | None:
    """Return the gate if it is requested, otherwise None. A process of a side has no gate.

    Raises:
        pytest.UsageError: an option has a value that is not allowed, or is not allowed with the gate.
    """
    # A side inherits `addopts`, but not the --stackwise-against of the command line.
    if config.pluginmanager.hasplugin("stackwise_side.plugin"):
        return None
    asked = options.gate(config)
    if asked is None:
        return None
    if records.is_worker(config) or config.getoption("numprocesses", None):
        raise pytest.UsageError("--stackwise-against: the gate needs the machine to itself; run it with -n 0")
    if config.getoption("benchmark_skip", False):
        raise pytest.UsageError("--stackwise-against: got --benchmark-skip too; allowed: one of them")
    if asked.history is not None:
        from stackwise.gate.history import open_store

        try:
            open_store(asked.history).close()
        except ValueError as error:
            raise pytest.UsageError(f"--stackwise-history: {error}") from None
    return Gate(config, asked)


class Gate:
    """Plugin that runs the comparison before the first test, and makes each test report its result."""

    def __init__(self, config: pytest.Config, asked: options.GateOptions) -> None:
        from stackwise.gate.side.clock import real_time

        self.config, self.asked = config, asked
        self.result: GateResult | None = None
        self._interrupted = False
        self._start_time = real_time.time()
        self._written: list[str] = []
        self._last_line = -math.inf
        self._verdicts: list[_Verdict] = []
        self._failed_setups = 0
        self._paths: list[Path] = []  # test files
        self._began = real_time.monotonic()  # the collection of tests is part of the time limit

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> None:
        """Run the comparison. pytest then runs the tests, which report their results."""
        goes_on = self.config.option.continue_on_collection_errors
        if self.config.option.collectonly or (session.testsfailed and not goes_on):
            return
        items = benchmark_items.gated(session.items)
        others = benchmark_items.not_gated(session.items, items)
        if not items:
            said = "no test uses benchmark or throughput: nothing to compare"
            raise pytest.UsageError("; ".join([f"--stackwise-against: {said}", *others]))
        self._paths = list({item.path: None for item in items})
        self.result = self._compare(items, session.items, others)
        by_name = {test.nodeid: test for test in self.result.tests}
        for item in items:
            # Fixtures are set up and torn down in the processes of the sides, not in this run.
            item.setup = item.teardown = lambda: None  # type: ignore[method-assign]
            item.get_closest_marker = _without_max_memory(item)  # type: ignore[method-assign]
            verdict = _Verdict(item, by_name[self._name(item)], self)
            item.runtest = verdict  # type: ignore[method-assign]
            self._verdicts.append(verdict)

    @pytest.hookimpl(tryfirst=True)
    def pytest_fixture_setup(self, fixturedef: Any, request: pytest.FixtureRequest) -> None:
        """Add a note if a test requests a benchmark fixture in a way that the gate did not detect."""
        if self.result is not None and fixturedef.argname in benchmark_items.FIXTURES:
            note = f"{request.node.nodeid}: not gated, since it requests {fixturedef.argname} in a helper"
            self.result = replace(self.result, notes=(*self.result.notes, note))

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(
        self, call: pytest.CallInfo[None]
    ) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        """Put the change and the limit into pytest's short summary. They fit in a line of 80 characters.

        Set-up errors are counted, to distinguish them from the other failures that pytest counts.
        """
        report = yield
        error = None if call.excinfo is None else call.excinfo.value
        self._failed_setups += report.failed and isinstance(error, GateSetupError)
        if isinstance(error, RegressionError | GateSetupError):
            crash = getattr(report.longrepr, "reprcrash", None)
            if crash is not None:
                crash.message = error.short
        return report

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item, nextitem: pytest.Item | None) -> object:
        """Run a gated test once: plugins that rerun failed tests would show its verdict several times."""
        if not isinstance(item.runtest, _Verdict):
            return None
        runner: Any = item.config.pluginmanager.get_plugin("runner")
        return runner.pytest_runtest_protocol(item, nextitem)

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        """Write the reports. Replace the exit code if no test failed, or only with set-up errors."""
        from stackwise.gate.report import publish
        from stackwise.gate.result import EXIT_INCONCLUSIVE

        status = session.exitstatus
        if self.result is None:
            # For example after pytest.exit(returncode=0), or if another plugin has run the tests.
            if status == pytest.ExitCode.OK and not self.config.option.collectonly:
                self._written.append("gate: nothing was compared: the run ended before the comparison")
                session.exitstatus = pytest.ExitCode.USAGE_ERROR
            return
        only_setup = status == pytest.ExitCode.TESTS_FAILED and session.testsfailed == self._failed_setups > 0
        # Tests without a benchmark, such as those of `quality`, may have set EXIT_INCONCLUSIVE before.
        if only_setup or status in (pytest.ExitCode.OK, EXIT_INCONCLUSIVE):
            session.exitstatus = self._exit_code(self.result, status)
        try:
            self._written += publish(self.result, self.asked.report)
            if self.asked.history is not None:
                self._written.append(self._keep(self.asked.history))
        except (OSError, ValueError) as error:
            self._written.append(f"not written: {error}")
            if not self._interrupted:
                session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def _exit_code(self, result: GateResult, status: int) -> int:
        """Return the exit code for the outcomes of the tests, or `status` if they need no other."""
        from stackwise.gate.result import EXIT_INCONCLUSIVE, EXIT_NOTHING, EXIT_SETUP

        outcomes = {test.outcome(self.asked.missing) for test in result.tests}
        # Expected failures (xfail) do not fail the run. pytest does not know the failures of the suite, and
        # of tests that did not run because of -x.
        unseen = {each.result.outcome(self.asked.missing) for each in self._verdicts if not each.reported}
        if result.suite is not None:
            unseen.add(result.suite.outcome("fail"))
        if "failed" in unseen:
            return pytest.ExitCode.TESTS_FAILED
        if "error" in outcomes:  # also of an xfail test: it was not measured
            return EXIT_SETUP
        if not result.compared:
            return EXIT_NOTHING
        return EXIT_INCONCLUSIVE if "inconclusive" in outcomes else status

    @pytest.hookimpl(trylast=True)  # last, because its verdict is that of the run
    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        """Show the result of each test, or the reason why there is no result."""
        from stackwise.gate.report import terminal_lines

        lines = list(self._written)
        if self.result is not None:
            verbose, width = self.config.get_verbosity() > 0, shutil.get_terminal_size().columns
            lines = [*terminal_lines(self.result, verbose=verbose, width=width), *lines]
        if lines:
            terminalreporter.section("stackwise gate")
        for line in lines:
            terminalreporter.write_line(line)

    def _keep(self, place: str) -> str:
        """Store the results of head in the history, unless the run was interrupted. Return a message."""
        if self._interrupted:
            return "gate: nothing was kept in the history, as the run was interrupted"
        from stackwise.gate.git import Checkout
        from stackwise.gate.history import open_store
        from stackwise.gate.history.machine import Machine
        from stackwise.gate.history.point import Run
        from stackwise.gate.history.record import results_of
        from stackwise.gate.tree import revision_name

        assert self.result is not None, "compared before"
        root = self._root
        here, results = Checkout.of(root), results_of(self.result)
        commit = here.commit if self.asked.head is None else revision_name(root, self.asked.head)
        run = Run(Machine.of(self.result.environment), commit, here.branch, notes=self.result.notes)
        with open_store(place) as store:
            store.add(run, results)
        return f"gate: kept {len(results)} results in the history"

    def _compare(
        self, items: Sequence[pytest.Item], selected: Sequence[pytest.Item], notes: Sequence[str]
    ) -> GateResult:
        """Run the gate.

        Args:
            items: tests to measure.
            selected: all tests of the run, in the order of the run.
            notes: notes to add to the result.
        """
        from stackwise.gate.report import counted
        from stackwise.gate.session import GateError, GateInterruptedError, run_gate
        from stackwise.gate.side.clock import real_time

        self._say(f"gate: compares {counted(len(items), 'test')} with {self.asked.against}")
        with _terminable():
            try:
                with self._trees(items) as (base, head, renamed):
                    spent = real_time.monotonic() - self._began
                    return run_gate(
                        base,
                        head,
                        [self._name(item) for item in items],
                        self._launch(items, selected),
                        limits={self._name(item): markers.gate_of(item, self.asked.limits) for item in items},
                        asked={self._name(item): markers.gated_metrics(item) for item in items},
                        places={self._name(item): _place(item, self._root) for item in items},
                        sampling=self._sampling(),
                        missing=self.asked.missing,
                        most_seconds=self.asked.seconds,
                        spent=spent,
                        seed=options.seed(self.config),
                        environment=self._environment(),
                        notes=[
                            *map(_told, renamed),
                            *_not_judged(items),
                            *notes,
                            *gate_judges.switch_off(self.config),
                        ],
                        on_progress=self._show,
                    )
            except GateInterruptedError as interrupted:
                # The results so far are published. pytest then ends as after Ctrl-C.
                self.result, self._interrupted = interrupted.result, True
                raise
            except (GateError, OSError, ValueError) as error:
                said = str(error).removeprefix("against: ")
                raise pytest.UsageError(f"--stackwise-against: {said}") from None

    def _trees(
        self, items: Sequence[pytest.Item]
    ) -> AbstractContextManager[tuple[Tree, Tree, list[Renamed]]]:
        from stackwise.gate.tree import Tree, both_trees

        root = self._root
        if self.asked.against == _CALLABLE:
            return nullcontext((Tree(root, "against"), Tree(root, "subject"), []))
        return both_trees(
            self.asked.against,
            root=root,
            tests=sorted({root / self._file(item) for item in items}),
            head=self.asked.head,
            build=self.asked.build,
            start=self.config.invocation_params.dir,
            settings=self.config.inipath and self.config.inipath.resolve(),
            conftests=_conftests_with_options(self.config, root),
        )

    def _file(self, item: pytest.Item) -> Path:
        """Return the file of a test, relative to the root. A symbolic link keeps its name, as in the node id.

        Raises:
            ValueError: the file is not below the root.
        """
        root, rootdir = self._root, self.config.rootpath
        if item.path.is_relative_to(rootdir):
            place = rootdir.resolve() / item.path.relative_to(rootdir)
        else:
            place = item.path.parent.resolve() / item.path.name
        if not place.is_relative_to(root):
            where = f"a file in {root}, whose files are compared (--rootdir=FOLDER or -c FILE sets another)"
            raise ValueError(f"tests: got {place}; allowed: {where}")
        return place.relative_to(root)

    def _name(self, item: pytest.Item) -> str:
        """Return the node id that a test has on the sides."""
        if self._rootdir == self.config.rootpath.resolve():
            return item.nodeid
        return f"{self._file(item).as_posix()}::{item.nodeid.partition('::')[2]}"

    @cached_property
    def _rootdir(self) -> Path:
        """The rootdir of the sides: that of this run if it is in the root and all tests are in it."""
        root, rootdir = self._root, self.config.rootpath
        holds_all = all(path.is_relative_to(rootdir) for path in self._paths)
        return rootdir.resolve() if holds_all and rootdir.resolve().is_relative_to(root) else root

    @cached_property
    def _root(self) -> Path:
        """The folder that is compared: the repository of rootdir or of the tests, or rootdir."""
        from stackwise.gate.tree import repository_of

        root = self.config.rootpath.resolve()
        found = repository_of(root)
        is_revision = not (self.config.invocation_params.dir / self.asked.against).exists()
        # A configuration file above the repository makes its folder the rootdir.
        if found is None and self._paths and is_revision and self.asked.against != _CALLABLE:
            found = repository_of(self._paths[0].parent)
        return found or root

    def _launch(self, items: Sequence[pytest.Item], selected: Sequence[pytest.Item]) -> Launch:
        from stackwise.gate.session import Launch
        from stackwise.gate.side.channel import CONFTEST

        functions = [item for item in selected if isinstance(item, pytest.Function)]
        of_file: dict[Path, list[str]] = {item.path: [] for item in items}
        for item in functions:
            of_file.get(item.path, []).append(self._name(item))
        files = {self._name(item): self._file(item) for item in (*items, *functions) if item.path in of_file}
        root, start = self._root, self.config.invocation_params.dir.resolve()
        config = self.config.inipath
        return Launch(
            (
                "-oaddopts=",
                *_own_arguments(self.config),
                *(f"{CONFTEST}={place}" for place in _conftests_with_options(self.config, root)),
                f"--rootdir={self._rootdir}",
                *(["-c", str(config.resolve())] if config is not None else []),
                "--maxfail=0",
                # If the base cannot import one file, the tests of the other files still run.
                "--continue-on-collection-errors",
                "-q",
                "--no-header",
                "--tb=short",
                # Plugins are detected by their options: a plugin that is loaded with -p has another name.
                *(["-n0"] if hasattr(self.config.option, "numprocesses") else []),
                *_seed_of_randomly(self.config),
                *(["--no-cov"] if hasattr(self.config.option, "no_cov") else []),
                # The timeout would print, and could end the process, while a test waits for the other side.
                *(
                    ["-ofaulthandler_timeout=0"]
                    if self.config.pluginmanager.hasplugin("faulthandler")
                    else []
                ),
            ),
            root,
            files,
            start.relative_to(root) if start.is_relative_to(root) else Path(),
            _imports(root),
            self.asked.timeout,
            self.asked.against == _CALLABLE,
            self.config.pluginmanager.hasplugin("cacheprovider"),
            {self._name(item): of_file[item.path] for item in items},
            self._start_time,
            self.asked.head is None,
        )

    def _sampling(self) -> Sampling:
        """Return the sampling. With a history, it times a pinned workload, to compare runs of other days."""
        from stackwise.gate.round import Sampling

        if self.asked.history is None:
            return Sampling()
        import torch

        from stackwise.gate.history.reference import Reference

        pinned = Reference(torch.device(options.device_name(self.config)))

        def seconds() -> tuple[float, float]:
            found = pinned.sample()
            return found.gemm, found.copy

        return Sampling(reference=seconds)

    def _environment(self) -> dict[str, Any]:
        """Return the fingerprint of the machine if a report or the history needs it. This loads torch."""
        if not self.asked.report and self.asked.history is None:
            return {}
        from stackwise.support.device import fingerprint

        return fingerprint(options.device_name(self.config))

    def _say(self, line: str) -> None:
        reporter = self.config.pluginmanager.get_plugin("terminalreporter")
        if reporter is not None:
            reporter.write_line(line)
            reporter.flush()

    def _show(self, progress: Progress) -> None:
        from stackwise.gate.report import counted
        from stackwise.support.progress import duration_text

        # A round takes from milliseconds to minutes. Lines are at least some seconds apart.
        if progress.seconds - self._last_line < _LINE_PAUSE and progress.open:
            return
        self._last_line = progress.seconds
        time = f"{progress.seconds:.0f} s"
        if math.isfinite(progress.most_left) and progress.open:
            time = f"{time}, at most {duration_text(progress.most_left)} left"
        if progress.passed is not None:
            self._say(f"gate: round {progress.round}: {counted(progress.passed, 'test')} measured ({time})")
            return
        confirming = f", {progress.confirming} being confirmed" if progress.confirming else ""
        waiting = f", {progress.waiting} not begun" if progress.waiting else ""
        undecided = f"{progress.open} of {counted(progress.tests, 'test')} undecided"
        self._say(f"gate: round {progress.round}: {undecided}{confirming}{waiting} ({time})")


class _Verdict:
    """Function of a gated test in the user's run. It reports the result of the test.

    Attributes:
        reported: True after the test was called.
    """

    def __init__(self, item: pytest.Item, result: TestResult, gate: Gate) -> None:
        self.item, self.result, self.gate = item, result, gate
        self.reported = False

    def __call__(self) -> None:
        """Pass, warn, skip or fail, by the outcome of the comparison."""
        __tracebackhide__ = True
        self.reported = True
        from stackwise.gate.report import junit_properties, short_text, test_text

        result = self.result
        self.item.user_properties.extend(junit_properties(result))
        text = test_text(result)
        match result.outcome(self.gate.asked.missing):
            case "failed":
                raise RegressionError(text, short_text(result))
            case "error":
                raise GateSetupError(text, short_text(result))
            case "inconclusive":
                pytest.skip(text)
            case "warned":
                # `filterwarnings = error` does not apply. --stackwise-missing=fail is the option for this.
                with warnings.catch_warnings():
                    warnings.simplefilter("always", GateWarning)
                    self.item.warn(GateWarning(text))
        if result.status == "skipped":
            pytest.skip(result.detail)


class _GivenOption(argparse.Action):
    """Action of argparse that records an option with its values as written, without conversion."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,  # noqa: ARG002
        namespace: argparse.Namespace,
        values: str | Sequence[Any] | None,
        option_string: str | None = None,
    ) -> None:
        """Append destination, name and values to `namespace.given`."""
        each = [values] if isinstance(values, str) else list(values or ())
        namespace.given.append((self.dest, option_string, each))


def _own_arguments(config: pytest.Config) -> list[str]:
    """Return the options of this run that decide how tests run, for the process of a side.

    They are those of `addopts`, of PYTEST_ADDOPTS and of the command line, which a side does not read. They
    are parsed as pytest has parsed them, so that each value stays with its option.
    """
    from pytest_benchmark.plugin import pytest_addoption

    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, fromfile_prefix_chars="@")
    for action in _actions(cast("Any", config)._parser):
        if action.option_strings:
            parser.add_argument(
                *action.option_strings, dest=action.dest, nargs=action.nargs, action=_GivenOption
            )
        else:
            parser.add_argument(action.dest, nargs="*")
    added = (*config.getini("addopts"), *shlex.split(os.environ.get("PYTEST_ADDOPTS", "")))
    arguments = [*added, *map(str, config.invocation_params.args)]
    known, _ = parser.parse_known_args(arguments, argparse.Namespace(given=[]))
    of_benchmark = pytest.Parser(_ispytest=True)
    cast("Any", pytest_addoption)(of_benchmark)
    own = _OWN | {action.dest for action in _actions(of_benchmark)}
    kept: list[str] = []
    for dest, name, values in known.given:
        if dest not in own and not dest.startswith(_OWN_FAMILY):
            joined = len(values) == 1 and (name.startswith("--") or values[0].startswith("-"))
            separator = "=" if name.startswith("--") else ""
            kept += [f"{name}{separator}{values[0]}"] if joined else [name, *values]
    return kept


def _conftests_with_options(config: pytest.Config, root: Path) -> list[Path]:
    """Return the conftests below `root` that may declare options, in the order in which they were loaded.

    A side runs some of the test files, and would find only the conftests of their folders.
    """
    modules = [plugin for _, plugin in config.pluginmanager.list_name_plugin()]
    names = ("pytest_addoption", "pytest_plugins")
    declaring = [module for module in modules if any(hasattr(module, name) for name in names)]
    files = [Path(getattr(module, "__file__", None) or "").resolve() for module in declaring]
    return [file for file in files if file.name == "conftest.py" and file.is_relative_to(root)]


def _actions(parser: Any) -> list[argparse.Action]:
    """Return the options and positional arguments that pytest and its plugins have declared."""
    # pytest 8.4 creates the parser when it parses.
    optparser = parser.optparser if hasattr(parser, "optparser") else parser._getparser()
    found: list[argparse.Action] = optparser._actions
    return found


def _seed_of_randomly(config: pytest.Config) -> list[str]:
    """Return the option that gives both sides the seed of this run, if pytest-randomly is in use."""
    if not hasattr(config.option, "randomly_seed"):
        return []
    return [f"--randomly-seed={config.option.randomly_seed}"]


def _imports(root: Path) -> tuple[Path, ...]:
    """Return the folders below `root` that this process imports from, relative to it."""
    from stackwise.gate.side.imports import file_of, is_installed

    found: dict[Path, None] = {}
    for entry in sys.path:
        place = Path(entry or ".").resolve()
        if place.is_relative_to(root) and place.is_dir() and not is_installed(place, root):
            found[place.relative_to(root)] = None
    # An editable installation may find packages without the path.
    for name, module in list(sys.modules.items()):
        file = file_of(module)
        if "." in name or file is None:
            continue
        path = Path(file).resolve()
        if path.name == "__init__.py" and path.is_relative_to(root) and not is_installed(path, root):
            found[path.parent.parent.relative_to(root)] = None
    return tuple(found)


def _place(item: pytest.Item, root: Path) -> tuple[str, int]:
    """Return the file of a test, relative to the root if the file is below it, and the line number."""
    path = item.path.resolve()
    return str(path.relative_to(root) if path.is_relative_to(root) else path), (item.location[1] or 0) + 1


def _without_max_memory(item: pytest.Item) -> Callable[..., Any]:
    """Return a `get_closest_marker` without max_memory, which would judge the memory of this process."""
    marker_of = item.get_closest_marker

    def closest(name: str, default: Any = None) -> Any:
        return default if name == "max_memory" else marker_of(name, default)

    return closest


def _not_judged(items: Sequence[pytest.Item]) -> list[str]:
    """Return a note on absolute limits of `throughput`, which a comparison does not judge, or []."""
    timed = [item for item in items if "throughput" in getattr(item, "fixturenames", ())]
    counts = {name: sum(bool(item.get_closest_marker(name)) for item in timed) for name in _ABSOLUTE}
    told = [f"{name} of {n} {'test' if n == 1 else 'tests'}" for name, n in counts.items() if n]
    return [f"not judged beside a base: {', '.join(told)}"] if told else []


def _told(renamed: Renamed) -> str:
    if renamed.new is None:
        return f"{renamed.old} is on the base and no longer on the head"
    return f"{renamed.old} of the base is {renamed.new} on the head"


@contextmanager
def _terminable() -> Iterator[None]:
    """Treat SIGTERM and SIGHUP inside the block as Ctrl-C, so that processes and trees are cleaned up."""
    before: dict[signal.Signals, Any] = {}

    def interrupt(number: int, _: object) -> None:
        # A second signal would interrupt the cleanup.
        for each in before:
            signal.signal(each, signal.SIG_IGN)
        raise KeyboardInterrupt(signal.Signals(number).name)

    for each in (signal.SIGTERM, signal.SIGHUP):
        # An ignored signal stays ignored, such as SIGHUP under nohup.
        if signal.getsignal(each) is not signal.SIG_IGN:
            with suppress(ValueError):  # not in the main thread, which alone handles signals
                before[each] = signal.signal(each, interrupt)
    try:
        yield
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)
