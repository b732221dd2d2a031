"""Page: a verdict, findings, plots and tables as one self-contained HTML file."""

from __future__ import annotations

import base64
import hashlib
import re
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from importlib.metadata import version
from importlib.resources import files
from pathlib import Path
from typing import Any, Literal

from stackwise.report.plot import Plot
from stackwise.support.files import write_whole
from stackwise.support.units import byte_text

__all__ = ["Finding", "Page", "Row", "Section", "Status", "Table", "findings_section"]

Status = Literal["failed", "warning", "passed", "neutral", "not applicable"]

_STATUSES: dict[Status, str] = {
    "failed": "Failed",
    "warning": "Warnings",
    "passed": "Passed",
    "neutral": "Measured",
    "not applicable": "Not applicable",
}
# Labels for the keys of `stackwise.support.device.fingerprint`.
_FACTS = {
    "cpu": "Processor",
    "cpu_count": "Cores",
    "gpu": "GPU",
    "system": "System",
    "python": "Python",
    "torch": "PyTorch",
    "torch_threads": "PyTorch threads",
    "omp_wait_policy": "OMP_WAIT_POLICY",
}
# Limits that keep a page small, however much fails.
_MAX_CARDS = 300  # findings of a section that are shown in full
_MAX_TEXT = 4000  # characters of a message
_MAX_CELL = 400  # characters of a cell of a table
# Control characters, which HTML does not allow.
_CONTROL = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f]")
_NO_PLOTS = "This report has no plots. To get them, run: pip install 'stackwise[report]'"


@dataclass(frozen=True)
class Finding:
    """Failure or warning. The page shows it in full.

    Attributes:
        status: "failed" or "warning".
        title: name of the check or test.
        subject: name of the model or training step; "": not known.
        label: text of the badge, such as "unstable"; "": the status.
        message: description of the problem.
        where: location: a position, a module, a line of a file.
        evidence: measured value and limit.
        advice: likely cause and next steps.
        command: shell command that repeats the finding; "": not known.
        details: further lines, such as the alarms of a run.
    """

    status: Status
    title: str
    subject: str = ""
    label: str = ""
    message: str = ""
    where: str = ""
    evidence: str = ""
    advice: str = ""
    command: str = ""
    details: tuple[str, ...] = ()

    @property
    def facts(self) -> list[tuple[str, str]]:
        """Labels and texts of the lines below the message, without lines that have no text."""
        texts = (("Where", self.where), ("Evidence", self.evidence), ("What to do", self.advice))
        return [(label, text) for label, text in texts if text]


@dataclass(frozen=True)
class Row:
    """Row of a table.

    Attributes:
        cells: one text for each column.
        status: status of the record.
        label: text of the badge, such as "caught"; "": no badge.
    """

    cells: Sequence[str]
    status: Status = "neutral"
    label: str = ""


@dataclass(frozen=True)
class Table:
    """Table of records.

    Attributes:
        title: caption, also for screen readers.
        header: names of the columns.
        rows: the records.
        right: names of the columns that are aligned to the right: numbers.
        code: names of the columns with names of tests and files, which may break at any character.
        wide: names of the columns with sentences.
        results: False: the rows are not results: not counted and not filtered.
    """

    title: str
    header: Sequence[str]
    rows: Sequence[Row]
    right: Collection[str] = ()
    code: Collection[str] = ("test",)
    wide: Collection[str] = ()
    results: bool = True

    @property
    def labelled(self) -> bool:
        """True if any row has a word for its status."""
        return any(row.label for row in self.rows)


@dataclass(frozen=True)
class Section:
    """Part of a page under a heading.

    Attributes:
        title: the heading.
        findings: failures and warnings, shown in full.
        plots: plots, shown before the tables.
        tables: tables, shown after the findings and plots.
        notes: sentences below the heading, before all other parts.
        folded: True: only the heading is shown until the reader opens the section.
        count: number after the heading; None: no number.
    """

    title: str
    findings: Sequence[Finding] = ()
    plots: Sequence[Plot] = ()
    tables: Sequence[Table] = ()
    notes: Sequence[str] = ()
    folded: bool = False
    count: int | None = None

    @property
    def anchor(self) -> str:
        """Id of the section in the page."""
        return f"section-{re.sub(r'[^a-z0-9]+', '-', self.title.lower()).strip('-')}"


def findings_section(title: str, findings: Sequence[Finding]) -> Section:
    """Return a section that shows the first 300 findings in full, and lists the rest in a table."""
    rest = [Row([each.title, each.subject], each.status, each.label) for each in findings[_MAX_CARDS:]]
    more = f"{len(rest)} more, in full in the JSON report"
    table = Table(more, ["name", "subject"], rest, code=("name",))
    return Section(title, findings[:_MAX_CARDS], tables=[table] if rest else [], count=len(findings))


@dataclass(frozen=True)
class Page:
    """Content of an HTML report.

    Attributes:
        title: subject of the report, such as "Checks of gpt" or "Performance of b against a".
        verdict: the result in one word.
        status: status of the verdict, which sets the colour of the page.
        summary: the result in one line.
        sections: in display order, with unique titles.
        environment: facts about the machine, as `stackwise.support.device.fingerprint` returns them.
        created: time of creation in UTC, as ISO 8601.
    """

    title: str
    verdict: str
    status: Status
    summary: str
    sections: Sequence[Section] = ()
    environment: Mapping[str, Any] | None = None
    created: str = field(default_factory=lambda: datetime.now(UTC).isoformat(timespec="seconds"))

    def write(self, path: str | Path) -> Path:
        """Write the page as one HTML file that needs no other file and no network, and return its path.

        Raises:
            OSError: the file cannot be written.
        """
        write_whole(Path(path), self.html())
        return Path(path)

    def html(self) -> str:
        """Return the page as HTML. Without matplotlib, a note explains how to get plots."""
        from jinja2 import Environment, PackageLoader, StrictUndefined
        from markupsafe import Markup

        drawings, notes = self._drawings()
        numbers = self._statuses()
        script = _template("page.js")
        digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
        environment = Environment(
            loader=PackageLoader("stackwise.report"),
            autoescape=True,
            undefined=StrictUndefined,
            trim_blocks=True,
            lstrip_blocks=True,
        )
        environment.filters["short"] = _shortened
        html = environment.get_template("page.html.j2").render(
            page=self,
            # The style sheet, the script and the drawings are the only parts that are not escaped.
            style=Markup(_template("page.css")),  # noqa: S704
            script=Markup(script),  # noqa: S704
            script_hash=f"sha256-{digest}",
            drawings={name: Markup(svg) for name, svg in drawings.items()},  # noqa: S704
            notes=notes,
            counts=self._counts(),
            filters=[
                (status, label) for status, label in _STATUSES.items() if any(n[status] for n in numbers)
            ],
            facts=list(_facts(self.environment or {})),
            version=version("stackwise"),
            max_cell=_MAX_CELL,
        )
        return _CONTROL.sub("\N{REPLACEMENT CHARACTER}", html)

    @property
    def has_findings(self) -> bool:
        """True if a section has findings. Table rows of these findings are then not counted twice."""
        return any(section.findings for section in self.sections)

    def _drawings(self) -> tuple[dict[str, str], list[str]]:
        """Return the drawings by "SECTION-NUMBER", and a note if matplotlib is missing."""
        found = {}
        for place, section in enumerate(self.sections):
            for number, plot in enumerate(section.plots):
                name = f"plot-{place}-{number}"
                try:
                    found[name] = plot.svg(name)
                except ImportError:
                    return {}, [_NO_PLOTS]
        return found, []

    def _counts(self) -> list[tuple[Status, str, int]]:
        """Return the status, the label and the number of results.

        If the page has findings, failed and warning rows are not counted twice.
        """
        findings, counts = self._statuses()
        if findings:
            counts["failed"], counts["warning"] = findings["failed"], findings["warning"]
        return [(status, label, counts[status]) for status, label in _STATUSES.items() if counts[status]]

    def _statuses(self) -> tuple[Counter[Status], Counter[Status]]:
        """Return the number of findings and the number of rows of each status."""
        findings = [finding for section in self.sections for finding in section.findings]
        tables = [table for section in self.sections for table in section.tables if table.results]
        rows = [row for table in tables for row in table.rows]
        return Counter(finding.status for finding in findings), Counter(row.status for row in rows)


def _shortened(text: str, limit: int = _MAX_TEXT) -> str:
    """Return the text without its middle if it is longer than `limit`."""
    if len(text) <= limit:
        return text
    return f"{text[: limit // 2]} [... {len(text) - limit:,} characters ...] {text[-(limit // 2) :]}"


def _template(name: str) -> str:
    return (files("stackwise.report") / "templates" / name).read_text(encoding="utf-8")


def _facts(environment: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield the label and the value of each known fact, without facts that are None."""
    for key, value in environment.items():
        if value is not None and value != {}:
            yield _FACTS.get(key, key), _fact(key, value)


def _fact(key: str, value: Any) -> str:
    if isinstance(value, Mapping):
        parts = (
            _fact(name, each) if name == "name" else f"{name.removesuffix('_bytes')} {_fact(name, each)}"
            for name, each in value.items()
            if each is not None
        )
        return ", ".join(parts)
    return byte_text(value) if key.endswith("_bytes") and isinstance(value, int) else str(value)
