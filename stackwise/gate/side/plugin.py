"""The pytest plugin inside the process of a side: its benchmarks do not time themselves, but when told to.

It says when a test has come to its measured call, makes calls as it is asked to, and lets the test go on when
it is told to. Loaded after all other plugins, so that its `benchmark` and `throughput` win over theirs.
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

from .channel import (  # beside this file, wherever it was copied to
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
from .early_imports import EarlyImports
from .imports import Imports
from .refusal import RefusedError
from .seeds import Seeds
from .subject import Repeated, Streamed, Subject, peak_memory, settle, warm_up
from .tracer import active_tracer
from .used_files import UsedFiles

__all__ = ["SidePlugin"]

_OUTSIDE = 3  # exit code of a process whose gate is gone
_LONGEST = 4000  # characters of what went wrong
_LONGEST_WARNING = 300  # characters
_MOST_WARNINGS = 5  # of a test
_AT_ONCE = "both sides run at the same time: "
_PORT = f"{_AT_ONCE}take a free port, or derive it from STACKWISE_SIDE"
_FILE = f"{_AT_ONCE}use tmp_path, or derive the name of the file from STACKWISE_SIDE"
# Parts of messages of errors that both sides raise if they share something, and what to do.
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
_EARLY = EarlyImports()
_SEEDS = Seeds(int(os.environ.pop(SEED, "0")))  # before a conftest draws anything


class OneCallError(RefusedError):
    """A test calls what it measures twice."""


class TracedError(RefusedError):
    """A tracer or a profiler is active when a test comes to its measured call."""


class SidePlugin:
    """Serves the gate.

    Args:
        channel: to the gate.
        role: "base" or "head".
        imports: what of its modules are its own.
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
        """Select the tests in the order of the gate, whatever plugins made of it, and send their names."""
        found = {item.nodeid: item for item in session.items}
        session.items[:] = [found[test] for test in self.tests if test in found]
        # By its entry point's name, or as `-p pytest_timeout` has it.
        has_timeout = any(map(session.config.pluginmanager.hasplugin, ("timeout", "pytest_timeout")))
        for item in session.items:
            _remove_reruns(item)
            if has_timeout:
                # A test waits here while the other side is measured: pytest-timeout would end it.
                item.add_marker(pytest.mark.timeout(0), append=False)
        self._send(collected=[item.nodeid for item in session.items])

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        """Run all tests: a plugin that ends the session, at a timeout for example, would end the round."""
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
                early=_EARLY.new(),
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
        """Run a test once, in this process: plugins that run it again or in a child process come later."""
        runner: Any = item.config.pluginmanager.get_plugin("runner")
        return runner.pytest_runtest_protocol(item, nextitem)

    def pytest_collectstart(self, collector: pytest.Collector) -> None:
        """Give the import of a file the same seeds on both sides, whatever was drawn before."""
        _SEEDS.start(collector.nodeid)

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_setup(self, item: pytest.Item) -> None:
        """Give the fixtures and the call of a test the same seeds on both sides.

        There are no new seeds before the call: they would replace the seeds that fixtures have set.
        """
        _SEEDS.start(item.nodeid)

    def pytest_exception_interact(
        self, call: pytest.CallInfo[Any], report: pytest.CollectReport | pytest.TestReport
    ) -> None:
        """Say which files cannot be collected, and with what: no report has the exception."""
        if not isinstance(report, pytest.CollectReport):
            return
        assert call.excinfo is not None, "called of an exception"
        error = call.excinfo.value
        # pytest tells of an import that fails, and of its syntax, in words of its own.
        cause = error.__cause__ if isinstance(error, pytest.Collector.CollectError) else None
        reason = _reason(report) if cause is None else f"{type(cause).__name__}: {cause}"
        self._send(not_collected=report.nodeid, detail=f"{reason[:_LONGEST]}{_advice_on_sharing(report)}")

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(
        self, call: pytest.CallInfo[None]
    ) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        """Tell tests that give up, and those that the gate refuses, from others that fail.

        Plugins that judge the duration see none: the test has waited while the other side was measured.
        """
        call.duration = 0.0
        report = yield
        # A subtest has the name and the phase of its test, and its report comes first.
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
        """Send how a phase of a test ended if it did not pass.

        The report of a subtest (a subclass of TestReport) is sent only if the subtest failed or was refused:
        its test goes on. A skip after the measurement does not remove the measurement.
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
        """pytest-benchmark's fixture, in whose place the gate measures."""
        return _benchmark_type()(request.node, self.serve)

    @pytest.fixture
    def throughput(self, request: pytest.FixtureRequest) -> Callable[..., Any]:
        """The fixture of the same name, in whose place the gate measures."""

        def run(subject: Any, *, against: Any = None, **arguments: Any) -> Any:
            if os.environ.get(CALLABLE):
                if against is None:
                    raise RefusedError("throughput got no `against`: there is nothing to compare with")
                subject = against if self.role == "base" else subject
            # That of this side, which may be another stackwise than what has started this process.
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
            found_once = getattr(fixtures, "found_once", None)  # older ones have none
            return None if found_once is None else found_once(workload)

        return run

    def serve(self, nodeid: str, subject: Subject, tokens: int = 0) -> list[float]:
        """Do what the gate asks for until it asks for no more.

        Args:
            nodeid: of the test.
            subject: what is measured.
            tokens: that a call handles; 0: nobody says.

        Returns:
            seconds of one call, for each turn that was measured.
        """
        if nodeid in self._served:
            raise OneCallError("a test that is gated measures one call; parametrize the test for more")
        tracer = active_tracer()
        if tracer:
            raise TracedError(
                f"{tracer} is active when the measured call begins, and would be timed too: "
                "switch it off in runs of the gate"
            )
        self._served.add(nodeid)
        if subject.only_once:
            _EARLY.forbid()
        settle()
        taken: list[float] = []
        self._send(test=nodeid, ready=True, only_once=subject.only_once, tokens=tokens)
        while True:
            match self._receive():
                case {"warm_up": seconds}:
                    self._send(sample=warm_up(subject, seconds))
                case {"calls": calls}:
                    # The warm-up makes the same calls, but one that is made only once has none.
                    with _FILES.timed(noting=subject.only_once):
                        sample = subject.seconds(calls)
                    taken.append(sample["time"])
                    self._send(sample=sample)
                case {"memory": True}:
                    with _FILES.paused():
                        memory = peak_memory(subject)
                    self._send(sample=memory)
                case _:
                    _FILES.look()  # while fixtures have their children
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
            # Nobody is left to be told, and nobody waits for what a test would still do.
            os._exit(_OUTSIDE)
        assert message is not None, "waited for without a limit"
        return message


class Benchmark:
    """What tests use of pytest-benchmark's fixture.

    Attributes:
        stats: pytest-benchmark's own, of this side's turns in this process, one number a turn; None before
            the call, and where pytest-benchmark is not installed.
        extra_info: for the test to write to; nobody reads it here.
        group: the same.
        name: of the test.
        disabled: False.
        enabled: True.
    """

    disabled, enabled = False, True
    has_error, cprofile_stats = False, None  # which its statistics ask for

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
        """Measure `target(*args, **kwargs)`; returns what it returns."""
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
        """The same with what is done around each call.

        How often it is called is for the gate to say, but for a single call without a setup, which may be one
        that cannot be made again.
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
        """Measure a call that is made once in each process, and return what it returns."""
        results: list[Any] = []

        def once() -> object:
            results.append(call())
            return results[0]

        self._serve(Repeated(once, only_once=True))
        return results[0] if results else call()

    def weave(self, *_: Any, **__: Any) -> None:
        """Refuse the test: the gate measures calls that the test makes itself.

        Raises:
            RefusedError: always.
        """
        raise RefusedError(
            "benchmark.weave (benchmark_weave, benchmark.patch) cannot be measured: "
            "call benchmark(function) in the test"
        )

    patch = weave


def _remove_reruns(item: pytest.Item) -> None:
    """Hide the marker `flaky`, which pytest-retry reads after the call of a test that failed."""
    marker_of = item.get_closest_marker

    def closest(name: str, default: Any = None) -> Any:
        return default if name == "flaky" else marker_of(name, default)

    item.get_closest_marker = closest  # type: ignore[method-assign]


def _is_of_subtest(report: pytest.TestReport) -> bool:
    """Return True if a report is that of a subtest, of pytest or of the plugin pytest-subtests."""
    return type(report) is not pytest.TestReport


def _ended(report: pytest.TestReport) -> str:
    """The outcome of a phase as if nothing were expected: what is, is for the gate to know."""
    if hasattr(report, "wasxfail") and report.when == "call":
        return "failed" if report.outcome == "skipped" else "passed"
    if isinstance(report.longrepr, str) and report.longrepr.startswith("[XPASS(strict)]"):
        return "passed"
    return report.outcome


def _reason(report: pytest.TestReport | pytest.CollectReport) -> str:
    """Why a phase ended, on a line or a few."""
    if isinstance(report.longrepr, tuple):
        return str(report.longrepr[2]).removeprefix("Skipped: ")
    crash = getattr(report.longrepr, "reprcrash", None)
    if crash is not None:
        return f"{crash.message} ({Path(crash.path).name}:{crash.lineno})"
    # Of a fixture that is not there pytest tells where it is asked for first, and then which ones there are.
    fixture = getattr(report.longrepr, "errorstring", None)
    return str(report.longrepr) if fixture is None else str(fixture).partition("\n")[0]


def _by_plugin(report: pytest.TestReport) -> bool:
    """Return True if an installed plugin skipped the test, as pytest-dependency does."""
    place = report.longrepr[0] if report.skipped and isinstance(report.longrepr, tuple) else ""
    return not {"site-packages", "dist-packages"}.isdisjoint(Path(place).parts)


def _advice_on_sharing(report: pytest.TestReport | pytest.CollectReport) -> str:
    """Return what to do if a test failed on a port or a file that both sides use; "": it did not."""
    # An error may have it as its cause, or a server in a child process may have printed it.
    text = f"{report.longreprtext}{report.capstderr}".lower() if report.failed else ""
    causes = (f"; {cause}: {advice}" for cause, advice in _SHARED.items() if cause in text)
    return next(causes, "")


def _benchmark_type() -> type[Benchmark]:
    """Benchmark, as a kind of pytest-benchmark's fixture where that is there: it asks for one."""
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
    # Those who skip benchmarks, or want nothing else, do so in the run that has asked for this one.
    for name in ("benchmark_skip", "benchmark_only", "benchmark_disable"):
        if hasattr(config.option, name):
            setattr(config.option, name, False)
    plugin = SidePlugin(Channel.of_descriptor(descriptor), os.environ[ROLE], imports)
    config.pluginmanager.register(plugin, "stackwise-gate-side")


def _places(name: str) -> list[str]:
    return [place for place in os.environ.pop(name, "").split(os.pathsep) if place]


def _used_files() -> UsedFiles:
    """Return what notes used files, from now on: conftests and plugins are loaded later."""
    tree, own, foreign = (
        [place for place in os.environ.get(name, "").split(os.pathsep) if place]
        for name in (TREE, OWN, FOREIGN)
    )
    return UsedFiles([*tree, *own], foreign, hook=bool(os.environ.get(WATCH)), has_tree=bool(tree))


_FILES = _used_files()
