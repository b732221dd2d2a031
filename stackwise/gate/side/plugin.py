"""Pytest plugin in the process of a side: its benchmarks are timed on request of the gate.

The plugin reports when a test reaches its measured call, runs calls on request, and lets the test continue on
request. It is loaded after all other plugins, so that its `benchmark` and `throughput` override their
fixtures.
"""

from __future__ import annotations

import argparse
import os
import warnings
from collections.abc import Callable, Generator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from .channel import (  # copied together with this file
    CALLABLE,
    CONFTEST,
    DESCRIPTOR,
    FOREIGN,
    OWN,
    ROLE,
    SEED,
    TESTS,
    TREE,
    WATCH,
    Channel,
    ChannelClosedError,
)
from .imports import Imports
from .seeds import Seeds
from .subject import RefusedError, Repeated, Streamed, Subject, active_tracer, peak_memory, settle, warm_up
from .used_files import UsedFiles

__all__ = ["SidePlugin"]

_OUTSIDE = 3  # exit code of a process after its gate has exited
_LONGEST = 4000  # characters of an error
_LONGEST_WARNING = 300  # characters
_MOST_WARNINGS = 5  # of a test
_AT_ONCE = "both sides run at the same time: "
_PORT = f"{_AT_ONCE}take a free port, or derive it from STACKWISE_SIDE"
_FILE = f"{_AT_ONCE}use tmp_path, or derive the name of the file from STACKWISE_SIDE"
# Parts of error messages that show that both sides use the same port or file, and the advice.
_SHARED = {
    "address already in use": _PORT,
    "database is locked": _FILE,  # SQLite
    "database table is locked": _FILE,
    "blockingioerror": _FILE,  # flock and lockf, portalocker, h5py
    "resource temporarily unavailable": _FILE,
    "could not be acquired": _FILE,  # filelock
    "unable to lock file": _FILE,  # HDF5
    "could not set lock on file": _FILE,  # DuckDB
}
_SEEDS = Seeds(int(os.environ.pop(SEED, "0")))  # before a conftest draws numbers


class SidePlugin:
    """Plugin that serves the gate.

    Args:
        channel: channel to the gate.
        role: "base" or "head".
        imports: origin of the modules of this process.
    """

    def __init__(self, channel: Channel, role: str, imports: Imports) -> None:
        self.channel, self.role, self.imports = channel, role, imports
        self.tests: list[str] = self._receive()["tests"]
        self._served: set[str] = set()
        self._measured: set[str] = set()
        self._gave_up: set[tuple[str, str | None]] = set()
        self._warnings: dict[str, list[str]] = {}
        self._refused: dict[tuple[str, str | None], str] = {}

    @pytest.hookimpl(tryfirst=True)
    def pytest_collection_finish(self, session: pytest.Session) -> None:
        """Select the tests in the order of the gate, regardless of other plugins, and send their names."""
        found = {item.nodeid: item for item in session.items}
        session.items[:] = [found[test] for test in self.tests if test in found]
        # Name of its entry point, or its name with `-p pytest_timeout`.
        has_timeout = any(map(session.config.pluginmanager.hasplugin, ("timeout", "pytest_timeout")))
        for item in session.items:
            _remove_reruns(item)
            if has_timeout:
                # A test waits here while the other side is measured. pytest-timeout would abort it.
                item.add_marker(pytest.mark.timeout(0), append=False)
        self._send(collected=[item.nodeid for item in session.items])

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        """Run all tests, even if a plugin stops the session early, for example at a timeout."""
        for item, following in zip(session.items, [*session.items[1:], None], strict=True):
            session.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
            _FILES.look()
            own, stray = self.imports.look()
            self._send(
                test=item.nodeid,
                over=True,
                measured=item.nodeid in self._served,
                watched=_FILES.has_hook,
                disturbed=_FILES.disturbed(),
                own=own,
                stray=stray,
                imported=self.imports.new(),
                files=_FILES.new(),
                warnings=self._warnings.pop(item.nodeid, [])[:_MOST_WARNINGS],
            )
        return True

    def pytest_warning_recorded(self, warning_message: warnings.WarningMessage, nodeid: str) -> None:
        """Store a RuntimeWarning, such as that of a coroutine that was never awaited."""
        if issubclass(warning_message.category, RuntimeWarning):
            place = f"{Path(warning_message.filename).name}:{warning_message.lineno}"
            text = f"{warning_message.category.__name__}: {warning_message.message}"[:_LONGEST_WARNING]
            self._warnings.setdefault(nodeid, []).append(f"{text} ({place})")

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item, nextitem: pytest.Item | None) -> object:
        """Run a test once, in this process, before plugins that would repeat or fork it."""
        runner: Any = item.config.pluginmanager.get_plugin("runner")
        return runner.pytest_runtest_protocol(item, nextitem)

    def pytest_collectstart(self, collector: pytest.Collector) -> None:
        """Set the same seeds on both sides for the import of a file, regardless of earlier random numbers."""
        _SEEDS.start(collector.nodeid)

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_setup(self, item: pytest.Item) -> None:
        """Set the same seeds on both sides for the fixtures and the call of a test.

        The call itself gets no new seeds, since they would replace the seeds that fixtures have set.
        """
        _SEEDS.start(item.nodeid)

    def pytest_exception_interact(
        self, call: pytest.CallInfo[Any], report: pytest.CollectReport | pytest.TestReport
    ) -> None:
        """Send the name of a file that cannot be collected, with the exception, which no report contains."""
        if not isinstance(report, pytest.CollectReport):
            return
        assert call.excinfo is not None, "called of an exception"
        error = call.excinfo.value
        # pytest replaces the message of an import error or a syntax error by its own text.
        cause = error.__cause__ if isinstance(error, pytest.Collector.CollectError) else None
        reason = _reason(report) if cause is None else f"{type(cause).__name__}: {cause}"
        self._send(not_collected=report.nodeid, detail=f"{reason[:_LONGEST]}{_advice_on_sharing(report)}")

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(
        self, call: pytest.CallInfo[None]
    ) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        """Record tests that call `pytest.xfail`, and tests that the gate refuses.

        The duration is set to 0, so that no plugin judges it: it includes the wait for the other side.
        """
        call.duration = 0.0
        report = yield
        # A subtest has the name and the phase of its test, and its report precedes that of the test.
        phase = (report.nodeid, report.when)
        self._gave_up.discard(phase)
        self._refused.pop(phase, None)
        if call.excinfo is not None and isinstance(call.excinfo.value, pytest.xfail.Exception):
            self._gave_up.add(phase)
        if call.excinfo is not None and isinstance(call.excinfo.value, RefusedError):
            self._refused[phase] = str(call.excinfo.value)
        return report

    @pytest.hookimpl(trylast=True)
    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Send the outcome of a phase of a test unless it passed.

        The report of a subtest (a subclass of TestReport) is sent only if the subtest failed or was refused,
        since its test continues. A skip after the measurement does not discard the measurement.
        """
        gave_up = (report.nodeid, report.when) in self._gave_up
        ended = "skipped" if gave_up else _ended(report)
        refusal = self._refused.get((report.nodeid, report.when))
        if refusal is not None:
            self._send(test=report.nodeid, ended="refused", when=report.when, detail=refusal)
        elif ended == "skipped" and (
            type(report) is not pytest.TestReport or report.nodeid in self._measured
        ):
            return
        elif ended != "passed":
            reason = str(report.wasxfail) if gave_up else _reason(report)
            advice = _advice_on_sharing(report)
            ended = "refused" if advice else ended
            detail = f"{reason[:_LONGEST]}{advice}"
            told = {"ended": ended, "when": report.when, "detail": detail, "by_plugin": _by_plugin(report)}
            self._send(test=report.nodeid, **told)

    @pytest.fixture
    def benchmark(self, request: pytest.FixtureRequest) -> Benchmark:
        """Return the replacement of pytest-benchmark's fixture, which measures for the gate."""
        return _benchmark_type()(request.node, self.serve)

    @pytest.fixture
    def throughput(self, request: pytest.FixtureRequest) -> Callable[..., Any]:
        """Return the replacement of the fixture `throughput`, which measures for the gate."""

        def run(subject: Any, *, against: Any = None, **arguments: Any) -> Any:
            if os.environ.get(CALLABLE):
                if against is None:
                    raise RefusedError("throughput got no `against`: there is nothing to compare with")
                subject = against if self.role == "base" else subject
            # The plugin of this side's stackwise, which may differ from the stackwise of the gate.
            fixtures = request.config.pluginmanager.get_plugin("stackwise-throughput")
            workload_of = getattr(fixtures, "workload_of", None)
            if workload_of is None:
                raise RefusedError("this side's stackwise is older than its gate")
            workload = workload_of(request, subject, arguments)
            tokens = int(workload.tokens)
            if workload.each_token is not None:
                self.serve(request.node.nodeid, Streamed(workload.each_token), tokens)
            else:
                self.serve(request.node.nodeid, Repeated(workload.call, workload.prepare), tokens)
            found_once = getattr(fixtures, "found_once", None)  # missing in older versions
            return None if found_once is None else found_once(workload)

        return run

    def serve(self, nodeid: str, subject: Subject, tokens: int = 0) -> list[float]:
        """Answer the requests of the gate until it releases the test.

        Args:
            nodeid: node ID of the test.
            subject: subject of the measurement.
            tokens: tokens per call; 0: unknown.

        Returns:
            seconds of one call, for each measured turn.
        """
        if nodeid in self._served:
            raise RefusedError("a test that is gated measures one call; parametrize the test for more")
        tracer = active_tracer()
        if tracer:
            raise RefusedError(
                f"{tracer} is active when the measured call begins, and would be timed too: "
                "switch it off in runs of the gate"
            )
        self._served.add(nodeid)
        settle()
        taken: list[float] = []
        self._send(test=nodeid, ready=True, only_once=subject.only_once, tokens=tokens)
        while True:
            match self._receive():
                case {"warm_up": seconds}:
                    self._send(sample=warm_up(subject, seconds))
                case {"calls": calls}:
                    # The files of other calls are noted in the warm-up, which a single call does not have.
                    with _FILES.timed(noting=subject.only_once):
                        sample = subject.seconds(calls)
                    taken.append(sample["time"])
                    self._send(sample=sample)
                case {"memory": True}:
                    with _FILES.paused():
                        memory = peak_memory(subject)
                    self._send(sample=memory)
                case _:
                    _FILES.look()  # while the child processes of fixtures exist
                    self._measured.add(nodeid)
                    return taken

    def _send(self, **message: Any) -> None:
        try:
            self.channel.send(message)
        except ChannelClosedError:
            os._exit(_OUTSIDE)

    def _receive(self) -> dict[str, Any]:
        try:
            message = self.channel.receive()
        except ChannelClosedError:
            # The gate has exited, so the rest of the test is not needed.
            os._exit(_OUTSIDE)
        assert message is not None, "waited for without a limit"
        return message


class Benchmark:
    """Interface of pytest-benchmark's fixture that tests use.

    Attributes:
        stats: statistics of pytest-benchmark over the turns of this side in this process; None before the
            call, and without pytest-benchmark.
        extra_info: dictionary for the test. Its content is ignored.
        group: group of the benchmark. It is ignored.
        name: name of the test.
        disabled: False.
        enabled: True.
    """

    disabled, enabled = False, True
    has_error, cprofile_stats = False, None  # required by its statistics

    def __init__(self, item: pytest.Item, serve: Callable[[str, Subject], list[float]]) -> None:
        self._item, self._serve_turns = item, serve
        self.stats: Any = None
        self.extra_info: dict[str, Any] = {}
        self.group: str | None = None
        self.name, self.fullname = item.name, item.nodeid
        case = getattr(item, "callspec", None)
        self.param: str | None = None if case is None else case.id
        self.params: dict[str, Any] | None = None if case is None else case.params

    def _serve(self, subject: Subject) -> None:
        if os.environ.get(CALLABLE):
            raise RefusedError("benchmark has no `against`: use throughput(new, against=old)")
        seconds = self._serve_turns(self._item.nodeid, subject)
        try:
            from pytest_benchmark.stats import Metadata
        except ImportError:
            return
        stats: Any = Metadata
        self.stats = stats(self, iterations=1, options={})
        for each in seconds:
            self.stats.update(each)

    def __call__(self, target: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Measure `target(*args, **kwargs)` and return its result."""
        call = partial(target, *args, **kwargs) if args or kwargs else target
        self._serve(Repeated(call))
        return call()

    def pedantic(
        self,
        target: Callable[..., Any],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
        setup: Callable[[], Any] | None = None,
        teardown: Callable[..., Any] | None = None,
        rounds: int = 1,
        warmup_rounds: int = 0,
        iterations: int = 1,
    ) -> Any:
        """Measure a call with a setup before and a teardown after each call, and return its result.

        The gate decides how often the call runs. The exception is a single call without a setup, which runs
        once, since it may not be repeatable.
        """
        if setup is None and rounds * iterations == 1 and not warmup_rounds:
            return self._single(partial(target, *args, **(kwargs or {})))
        if setup is None and teardown is None:
            return self(target, *args, **(kwargs or {}))
        given: list[tuple[tuple[Any, ...], dict[str, Any]]] = [(tuple(args), dict(kwargs or {}))]

        def prepare() -> None:
            found = setup() if setup is not None else None
            if found is not None:
                given[0] = found

        def call() -> Any:
            return target(*given[0][0], **given[0][1])

        def after() -> None:
            if teardown is not None:
                teardown(*given[0][0], **given[0][1])

        self._serve(Repeated(call, prepare, after))
        prepare()
        result = call()
        after()
        return result

    def _single(self, call: Callable[[], Any]) -> Any:
        """Measure a call that runs once in each process, and return its result."""
        results: list[Any] = []

        def once() -> object:
            results.append(call())
            return results[0]

        self._serve(Repeated(once, only_once=True))
        return results[0] if results else call()

    def weave(self, *_: Any, **__: Any) -> None:
        """Refuse the test: the gate measures only direct calls of the test.

        Raises:
            RefusedError: always.
        """
        raise RefusedError(
            "benchmark.weave (benchmark_weave, benchmark.patch) cannot be measured: "
            "call benchmark(function) in the test"
        )

    patch = weave


def _remove_reruns(item: pytest.Item) -> None:
    """Hide the marker `flaky`, which pytest-retry reads after the call of a failed test."""
    marker_of = item.get_closest_marker

    def closest(name: str, default: Any = None) -> Any:
        return default if name == "flaky" else marker_of(name, default)

    item.get_closest_marker = closest  # type: ignore[method-assign]


def _ended(report: pytest.TestReport) -> str:
    """Return the outcome of a phase without regard to an expected failure, which the gate handles itself."""
    if hasattr(report, "wasxfail") and report.when == "call":
        return "failed" if report.outcome == "skipped" else "passed"
    if isinstance(report.longrepr, str) and report.longrepr.startswith("[XPASS(strict)]"):
        return "passed"
    return report.outcome


def _reason(report: pytest.TestReport | pytest.CollectReport) -> str:
    """Return the reason for the outcome of a phase, in one or a few lines."""
    if isinstance(report.longrepr, tuple):
        return str(report.longrepr[2]).removeprefix("Skipped: ")
    crash = getattr(report.longrepr, "reprcrash", None)
    if crash is not None:
        return f"{crash.message} ({Path(crash.path).name}:{crash.lineno})"
    # The text of a missing fixture begins with the code that requests it. Its error string has the fixture in
    # the first line, and then all available fixtures.
    fixture = getattr(report.longrepr, "errorstring", None)
    return str(report.longrepr) if fixture is None else str(fixture).partition("\n")[0]


def _by_plugin(report: pytest.TestReport) -> bool:
    """Return True if an installed plugin skipped the test, as pytest-dependency does."""
    place = report.longrepr[0] if report.skipped and isinstance(report.longrepr, tuple) else ""
    return not {"site-packages", "dist-packages"}.isdisjoint(Path(place).parts)


def _advice_on_sharing(report: pytest.TestReport | pytest.CollectReport) -> str:
    """Return advice if a test failed on a port or a file that both sides use, otherwise ""."""
    # The text may be the cause of an error, or the output of a server in a child process.
    text = f"{report.longreprtext}{report.capstderr}".lower() if report.failed else ""
    causes = (f"; {cause}: {advice}" for cause, advice in _SHARED.items() if cause in text)
    return next(causes, "")


def _benchmark_type() -> type[Benchmark]:
    """Return `Benchmark`, as a subclass of pytest-benchmark's fixture if installed: it checks the type."""
    try:
        from pytest_benchmark.fixture import BenchmarkFixture
    except ImportError:
        return Benchmark
    return type("Benchmark", (Benchmark, BenchmarkFixture), {})


def pytest_addoption(parser: pytest.Parser) -> None:
    """Declare the option by which the gate names more conftests to load at the start."""
    parser.addoption(CONFTEST, action="append", default=[], help=argparse.SUPPRESS)


@pytest.hookimpl(tryfirst=True)
def pytest_load_initial_conftests(early_config: pytest.Config) -> None:
    """Load the conftests of the user's run that declare options, before the options are parsed.

    They may lie in folders of which this process runs no test.
    """
    known = early_config.known_args_namespace
    conftests = [place for place in known.stackwise_side_conftest if Path(place).is_file()]
    known.file_or_dir = [*conftests, *known.file_or_dir]  # only pytest's search for conftests reads this


@pytest.hookimpl(trylast=True)
def pytest_configure(config: pytest.Config) -> None:
    """Serve the gate that has started this process."""
    descriptor = int(os.environ.pop(DESCRIPTOR))
    tree, tests, foreign, own = (_places(name) for name in (TREE, TESTS, FOREIGN, OWN))
    imports = Imports(next(iter(tree), None), tests, foreign, own)
    # Options that skip or select benchmarks apply to the user's run only.
    for name in ("benchmark_skip", "benchmark_only", "benchmark_disable"):
        if hasattr(config.option, name):
            setattr(config.option, name, False)
    plugin = SidePlugin(Channel.of_descriptor(descriptor), os.environ[ROLE], imports)
    config.pluginmanager.register(plugin, "stackwise-gate-side")


def _places(name: str) -> list[str]:
    return [place for place in os.environ.pop(name, "").split(os.pathsep) if place]


def _used_files() -> UsedFiles:
    """Return the record of used files, active from now on: conftests and plugins are loaded later."""
    tree, own, foreign = (
        [place for place in os.environ.get(name, "").split(os.pathsep) if place]
        for name in (TREE, OWN, FOREIGN)
    )
    return UsedFiles([*tree, *own], foreign, hook=bool(os.environ.get(WATCH)), has_tree=bool(tree))


_FILES = _used_files()
