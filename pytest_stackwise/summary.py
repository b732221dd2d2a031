"""Summary of the records of all tests, on the terminal and in the report."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import pytest

from pytest_stackwise import options, records

if TYPE_CHECKING:
    from stackwise.report import Report

__all__ = ["Summary"]


class Summary:
    """Plugin that collects the records of all tests in the main process, including those of xdist workers."""

    def __init__(self, config: pytest.Config) -> None:
        self.config = config
        self._reports: dict[str, pytest.TestReport] = {}
        self._failed: list[str] = []
        self._errors: dict[str, dict[str, str]] = {}
        self._complete = True
        self._notes: list[str] = []

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Store the last report of each test with records, and the errors of failed tests."""
        if records.of_report(report):
            self._reports[report.nodeid] = report
        if report.failed:
            self._add_failure(report)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        """Treat a file that cannot be collected as failed."""
        if report.failed:
            self._add_failure(report)

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionfinish(self, session: pytest.Session, exitstatus: int) -> None:
        """Write the report."""
        finished = (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED, pytest.ExitCode.NO_TESTS_COLLECTED)
        self._complete = exitstatus in finished
        if records.is_worker(self.config) or self.config.option.collectonly:
            return
        if exitstatus == pytest.ExitCode.USAGE_ERROR:
            return
        paths = options.report_paths(self.config)
        if not paths:
            return
        from stackwise.support.device import fingerprint

        report = self._report()
        report.environment = fingerprint(options.device_name(self.config))
        for path in paths:
            try:
                report.write(path)
                self._notes.append(f"report: {os.path.relpath(path, self.config.invocation_params.dir)}")
            except Exception as error:
                self._notes.append(f"report not written: {path}: {type(error).__name__}: {error}")
                session.exitstatus = pytest.ExitCode.TESTS_FAILED

    @pytest.hookimpl(trylast=True)
    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        """Show the records and the verdict, after the tables of other plugins such as pytest-benchmark."""
        if not self._reports and not self._notes:
            return
        terminalreporter.section("stackwise")
        verbosity = self.config.get_verbosity()
        for line in (*self._report().lines(verbosity), *self._notes):
            terminalreporter.write_line(line)

    def _add_failure(self, report: pytest.TestReport | pytest.CollectReport) -> None:
        self._failed.append(report.nodeid)
        self._errors.setdefault(report.nodeid, _error(report))

    def _report(self) -> Report:
        from stackwise.report import Report

        failed = list(dict.fromkeys(self._failed))
        report = Report(failed_tests=failed, errors=self._errors, complete=self._complete)
        for record in _told_apart(
            record for test in self._reports.values() for record in records.of_report(test)
        ):
            report.add(**record)
        names = [*failed, *(report.name_of(record) for _, record in report.findings())]
        report.commands = {name: _repeat_command(self.config, name) for name in names}
        return report


def _told_apart(rows: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the records, with the name of the test added to names that several models share.

    If two tests run the same check on models of one name, these are treated as two models.
    """
    rows = list(rows)
    tests: dict[tuple[str, str], set[str]] = {}
    for row in rows:
        if row["section"] == "checks":
            tests.setdefault((row["model"], row["check"]), set()).add(_function_of(row["test"]))
    shared = {model for (model, _), functions in tests.items() if len(functions) > 1}
    return [
        row | {"model": f"{row['model']} in {_function_of(row['test'])}"}
        if row["section"] == "checks" and row["model"] in shared
        else row
        for row in rows
    ]


def _function_of(nodeid: str) -> str:
    """Return the node id of a test without its parameters."""
    return nodeid.partition("[")[0]


def _error(report: pytest.TestReport | pytest.CollectReport) -> dict[str, str]:
    """Return location and message of the error of a failed test."""
    crash = getattr(report.longrepr, "reprcrash", None)
    if crash is None:
        return {"where": "", "message": report.longreprtext}
    return {"where": f"{os.path.relpath(crash.path)}:{crash.lineno}", "message": crash.message}


def _repeat_command(config: pytest.Config, nodeid: str) -> str:
    """Return the shell command that repeats a test, with the seed and the device of this run."""
    zero_code = re.fullmatch(r"stackwise\[(.+)\]::(\w+)", nodeid)
    if zero_code:
        target, name = zero_code.groups()
        words = ["stackwise", "check", target, *([] if name in ("model", "trainer") else ["--checks", name])]
        words += ["--seed", str(options.seed(config)), "--device", options.device_name(config)]
        words += ["--suite", "full"] if options.suite(config) == "full" else []
        words += ["--strict"] if options.strict(config) else []
        words += ["--trust-remote-code"] if config.getoption("stackwise_trust_remote_code") else []
        return shlex.join(words)
    chosen = {name: config.getoption(f"stackwise_{name}") for name in ("seed", "device", "suite")}
    # Node ids are relative to the root folder, and the command runs in the folder of this run.
    file, separator, test = nodeid.partition("::")
    file = os.path.relpath(config.rootpath / file, config.invocation_params.dir)
    words = ["pytest", f"{file}{separator}{test}"]
    words += [f"--stackwise-{name}={value}" for name, value in chosen.items() if value is not None]
    words += ["--gpu"] if options.gpu_requested(config) else []
    words += ["--stackwise-strict"] if config.getoption("stackwise_strict") else []
    return shlex.join(words)
