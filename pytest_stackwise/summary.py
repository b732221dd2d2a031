"""The summary: what all tests found out, on the terminal and in the report."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest

from pytest_stackwise import options, records

if TYPE_CHECKING:
    from stackwise.report import Report

__all__ = ["Summary"]


class Summary:
    """Collects the records of all tests, of xdist's workers too, in the process that talks to the user."""

    def __init__(self, config: pytest.Config) -> None:
        self.config = config
        self._reports: dict[str, pytest.TestReport] = {}
        self._failed: list[str] = []
        self._complete = True
        self._notes: list[str] = []

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Keep the reports that carry records, of a rerun test the last, and the names of failed tests."""
        if records.of_report(report):
            self._reports[report.nodeid] = report
        if report.failed:
            self._failed.append(report.nodeid)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        """A file that cannot be collected has failed too."""
        if report.failed:
            self._failed.append(report.nodeid)

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
        from stackwise.device import fingerprint

        report = self._report()
        report.environment = fingerprint(options.device_name(self.config))
        for path in paths:
            try:
                report.write(path)
                self._notes.append(f"written: {os.path.relpath(path, self.config.invocation_params.dir)}")
            except OSError as error:
                self._notes.append(f"not written: {path}: {error}")
                session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        """Show the records, where there are any."""
        if not self._reports and not self._notes:
            return
        terminalreporter.section("stackwise")
        verbosity = self.config.get_verbosity()
        for line in (*self._report().lines(verbosity), *self._notes):
            terminalreporter.write_line(line)

    def _report(self) -> Report:
        from stackwise.report import Report

        report = Report(failed_tests=list(dict.fromkeys(self._failed)), complete=self._complete)
        for test in self._reports.values():
            for record in records.of_report(test):
                report.add(**record)
        return report
