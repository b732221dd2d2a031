"""The summary: what all tests found out, on the terminal and in the report."""

from __future__ import annotations

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
        self._reports: list[pytest.TestReport] = []
        self._failed: list[str] = []

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Keep the reports that carry records, and the names of failed tests."""
        if records.of_report(report):
            self._reports.append(report)
        if report.failed:
            self._failed.append(report.nodeid)

    def pytest_sessionfinish(self) -> None:
        """Write the report."""
        if hasattr(self.config, "workerinput"):
            return
        paths = options.report_paths(self.config)
        if paths:
            report = self._report()
            for path in paths:
                report.write(path)

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        """Show the records, where there are any."""
        if not self._reports:
            return
        terminalreporter.section("stackwise")
        for line in self._report().lines():
            terminalreporter.write_line(line)
        for path in options.report_paths(self.config):
            terminalreporter.write_line(f"written: {path}")

    def _report(self) -> Report:
        from stackwise.report import Report

        report = Report(failed_tests=list(dict.fromkeys(self._failed)))
        for test in self._reports:
            for record in records.of_report(test):
                report.add(**record)
        return report
