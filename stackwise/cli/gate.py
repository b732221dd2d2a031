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

    Exit code 1 if one got worse or fails on head, 4 for a wrong set-up, 5 if nothing was compared, 7 if it
    is not known.
    """

    base: tyro.conf.Positional[str]
    """The old side: a revision, ./FOLDER, a wheel, or "callable": what each test names as `against`. A file
    that pytest-benchmark has saved (.json) is compared with `head`, another one, and nothing is measured."""
    head: Annotated[str | None, tyro.conf.Positional] = None
    """The new side, a revision; none: the files as they are."""
    tests: tuple[str, ...] = ()
    """Files, folders or names of tests, as pytest takes them; none: those of the configuration file."""
    limits: str | None = None
    """Of tests whose marker `gate` does not say, such as time=2%,memory=1%,floor=50us."""
    missing: str | None = None
    """How to treat a test that the base does not have: fail, warn or create."""
    seconds: float | None = None
    """Time limit; what cannot be told within it is INCONCLUSIVE."""
    timeout: float | None = None
    """A process that says nothing for so many seconds hangs; none: 600."""
    build: str | None = None
    """Run this command in both trees before, to compile extensions, say."""
    report: str | None = None
    """Write the results to this file: .md, .json, .html, or all of them if the name has no ending."""
    history: str | None = None
    """Keep what was found of head here: an SQLite file, or postgresql://USER:PASSWORD@HOST/DATABASE."""

    def run(self, pytest_options: Sequence[str] = ()) -> int:
        """Hand over to pytest, which finds the tests, and return its exit code.

        Args:
            pytest_options: further arguments of pytest, such as options of a conftest.
        """
        if self.base.endswith(".json"):
            allowed = "none where saved files are compared: nothing is run"
            require(not pytest_options, "options after --", list(pytest_options), allowed)
            return self._compare_saved(Path(self.base))
        return self._measure(pytest_options)

    def _measure(self, pytest_options: Sequence[str]) -> NoReturn:
        """Become pytest, so that a signal for this process ends the sides as well."""
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
        """Compare what was saved, which knows nothing of what the machine did then."""
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
