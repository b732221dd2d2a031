"""Gate: the command that compares the benchmarks of two revisions, for any CI that can run a command."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn, cast

import tyro

from stackwise.support.arguments import require

if TYPE_CHECKING:
    from stackwise.gate.result import Missing

__all__ = ["Gate"]


@dataclass(frozen=True)
class Gate:
    """Compare the benchmarks of two revisions. Options of pytest and of a conftest follow after `--`.

    Exit codes: 0: no regression; 1: a test is slower, larger or fails on head; 4: set-up error; 5: nothing
    was compared; 7: inconclusive.
    """

    base: tyro.conf.Positional[str]
    """The old version: a revision such as main or HEAD~1, ./FOLDER, a wheel, or "callable" for the `against`
    of each test. If base and head are files saved by pytest-benchmark (.json), nothing is measured."""
    head: Annotated[str | None, tyro.conf.Positional] = None
    """The new version, a revision; if not given: the working tree."""
    tests: tuple[str, ...] = ()
    """Files, folders or node ids of tests, as for pytest; if not given: those of the configuration file."""
    limits: str | None = None
    """Limits for tests without the marker `gate`, such as time=2%,memory=1%,floor=50us."""
    missing: str | None = None
    """Action for a test that the base lacks: fail, warn or create; if not given: warn."""
    seconds: float | None = None
    """Time limit; tests that are undecided at its end are INCONCLUSIVE; if not given: no limit."""
    timeout: float | None = None
    """End a process that reports nothing for this number of seconds; if not given: 600."""
    build: str | None = None
    """Command to run in both revisions before measuring, for example to compile extensions."""
    report: str | None = None
    """Write the results to this file: .md, .json, .html, or all three if the name has no suffix."""
    history: str | None = None
    """Store the results of head: the path of an SQLite file, or postgresql://USER:PASSWORD@HOST/DATABASE."""

    def run(self, pytest_options: Sequence[str] = ()) -> int:
        """Compare two revisions with pytest, or two saved files directly, and return the exit code.

        Args:
            pytest_options: further arguments of pytest, such as options of a conftest.
        """
        if self.base.endswith(".json"):
            allowed = "none where saved files are compared: nothing is run"
            require(not pytest_options, "options after --", list(pytest_options), allowed)
            return self._compare_saved(Path(self.base))
        return self._measure(pytest_options)

    def _measure(self, pytest_options: Sequence[str]) -> NoReturn:
        """Replace this process by pytest, so that a signal to it also ends the processes of the sides."""
        options = {
            "against": self.base,
            "head": self.head,
            "gate": self.limits,
            "missing": self.missing,
            "gate-seconds": self.seconds,
            "gate-timeout": self.timeout,
            "build": self.build,
            "gate-report": self.report,
            "history": self.history,
        }
        given = [f"--stackwise-{name}={value}" for name, value in options.items() if value is not None]
        command = [sys.executable, "-m", "pytest", *given, *self.tests, *pytest_options]
        os.execv(sys.executable, command)  # noqa: S606

    def _compare_saved(self, base: Path) -> int:
        """Compare two saved files. They do not contain the state of the machine during the measurement."""
        from stackwise.gate.limit import Limits, parse_limits
        from stackwise.gate.report import publish, terminal_lines
        from stackwise.gate.stored import compare_stored
        from stackwise.report import report_files
        from stackwise.support.arguments import check_choice

        head, missing = self.head or "", self.missing or "warn"
        require(
            head.endswith(".json"), "head", self.head, "a file that pytest-benchmark has saved, as base is"
        )
        check_choice("missing", missing, ("fail", "warn", "create"))
        for name in ("tests", "seconds", "timeout", "build", "history"):
            given = getattr(self, name)
            require(given in (None, ()), name, given, "none where saved files are compared: nothing is run")
        limits = Limits() if self.limits is None else Limits().changed(**parse_limits(self.limits))
        files = report_files(Path(self.report)) if self.report else ()
        result = compare_stored(base, Path(head), limits, missing=cast("Missing", missing))
        for line in (*terminal_lines(result, verbose=True), *publish(result, files)):
            print(line)
        return result.exit_code
