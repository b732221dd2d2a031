"""Report: the records of a run, as text, Markdown, JSON and HTML, with one verdict."""

from __future__ import annotations

import json
import math
import textwrap
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any, Self

from stackwise.report.row_text import (
    MARKS,
    asked_and_not,
    by_model,
    check_text,
    fault_text,
    finding_texts,
    growth_lines,
    is_finding,
    measured_text,
    memory_text,
    number_text,
    outcome,
    rate_text,
    record_table,
    says_something,
    shape_text,
)
from stackwise.support.arguments import require
from stackwise.support.files import parse_json, write_whole
from stackwise.support.markdown import markdown_table

__all__ = ["Report", "report_files", "training_record"]

_WIDTH = 100  # line width of findings
_SECTIONS = ("checks", "stability", "throughput", "memory", "quality")
_ENDINGS = (".md", ".json", ".html")


@dataclass
class Report:
    """Checks, measurements and verdict of one test run or command, as text, Markdown, JSON or HTML.

    Attributes:
        checks: CheckResults as dicts.
        stability: StabilityRuns as dicts.
        throughput: Measurements and GenerationMeasurements as dicts, with their shape.
        memory: memory peaks ("peak") and growth per step ("growth"), each with its test.
        quality: task results of models, each with its test.
        training: parameters, steps, seconds, speed and losses of a training run, optionally with the
            "records" of its steps and its "alarms". None: no training run.
        environment: the machine's fingerprint, or None.
        failed_tests: names of all failed tests.
        errors: "where" (location) and "message" of the error, by the name of the failed test.
        commands: shell command that repeats a test or check, by its name, for failures and findings.
        subjects: notes on each model and training loop: the facts that were inferred or assumed.
        noun: "test", or "check" if checks ran without tests.
        complete: True if the run was not interrupted.
        created: time of creation in UTC, as ISO 8601.
    """

    checks: list[dict[str, Any]] = field(default_factory=list)
    stability: list[dict[str, Any]] = field(default_factory=list)
    throughput: list[dict[str, Any]] = field(default_factory=list)
    memory: list[dict[str, Any]] = field(default_factory=list)
    quality: list[dict[str, Any]] = field(default_factory=list)
    training: dict[str, Any] | None = None
    environment: dict[str, Any] | None = None
    failed_tests: list[str] = field(default_factory=list)
    errors: dict[str, dict[str, str]] = field(default_factory=dict)
    commands: dict[str, str] = field(default_factory=dict)
    subjects: dict[str, str] = field(default_factory=dict)
    noun: str = "test"
    complete: bool = True
    created: str = field(default_factory=lambda: datetime.now(UTC).isoformat(timespec="seconds"))

    def add(self, section: str, **record: Any) -> None:
        """Add a record to "checks", "stability", "throughput", "memory" or "quality".

        A record of "checks" may have "subject_notes", which become the notes on its model.
        """
        if section not in _SECTIONS:
            raise ValueError(f"section: got {section!r}; allowed: {', '.join(_SECTIONS)}")
        if notes := record.pop("subject_notes", ""):
            self.subjects[record["model"]] = notes
        getattr(self, section).append(record)

    @property
    def verdict(self) -> str:
        """The result of the whole run, in one word.

        - FAIL: a test or check failed.
        - INCOMPLETE: the run was interrupted.
        - EMPTY: nothing was checked or measured. Checks that do not apply are not enough.
        - WARN: no test failed, but there is a finding: a check warned, a run was unstable, memory grew.
        - PASS: none of these.
        """
        if self.failed_tests:
            return "FAIL"
        if not self.complete:
            return "INCOMPLETE"
        records = [(section, row) for section in _SECTIONS for row in getattr(self, section)]
        if not self.training and not any(says_something(*record) for record in records):
            return "EMPTY"
        diverged = self.training is not None and not math.isfinite(float(self.training["final_loss"]))
        return "WARN" if diverged or any(is_finding(*record) for record in records) else "PASS"

    def findings(self) -> Iterator[tuple[str, dict[str, Any]]]:
        """Yield the section and the record of each finding, in the order of the sections."""
        for section in _SECTIONS:
            for row in getattr(self, section):
                if is_finding(section, row):
                    yield section, row

    @staticmethod
    def name_of(row: dict[str, Any]) -> str:
        """Return the name of a record in `failed_tests`, `errors` and `commands`."""
        return str(row.get("test") or f"{row['model']}::{row.get('check', '')}".removesuffix("::"))

    def summary(self) -> str:
        """Return the verdict and the number of results of each kind, in one line."""
        return f"verdict: {self.verdict} ({self.counts_text()})"

    def counts_text(self) -> str:
        """Return the number of results of each kind, in one line."""
        parts = []
        if self.training:
            first, final = self.training["first_loss"], self.training["final_loss"]
            parts.append(f"training: {self.training['num_batches']} steps, loss {first:.3f} -> {final:.3f}")
        for section in _SECTIONS:
            counts = Counter(outcome(section, row) for row in getattr(self, section))
            names = MARKS if section == "checks" else counts
            if counts:
                parts.append(f"{section}: " + ", ".join(f"{counts[n]} {n}" for n in names if counts[n]))
        # Without tests, each failure is one of the checks above.
        if self.failed_tests and self.noun == "test":
            plural = "" if len(self.failed_tests) == 1 else "s"
            parts.append(f"{len(self.failed_tests)} {self.noun}{plural} failed")
        return "; ".join(parts) or "no results"

    def training_line(self) -> str:
        """Return size, speed and losses of the training run in one line, or "" without a training run."""
        run = self.training
        if run is None:
            return ""
        validation = run.get("validation_loss")
        held_out = f", validation {validation:.3f}" if validation is not None else ""
        return (
            f"training: {run['parameters']:,} parameters, {run['num_batches']} steps in "
            f"{run['seconds']:.0f} s ({run['tokens_per_second']:,.0f} tokens/s), "
            f"loss {run['first_loss']:.3f} -> {run['final_loss']:.3f}{held_out} "
            f"nats per {run.get('predicted', 'byte')}"
        )

    def lines(self, verbosity: int = 0) -> Iterator[str]:
        """Yield plain text for a terminal. The last line is the verdict with all counts.

        Args:
            verbosity: below 0: findings only. 0: also declared findings and measurements. Above 0: also
                checks that passed, and the reasons why checks do not apply. An EMPTY run shows the reasons
                from 0 on.
        """
        if verbosity == 0 and self.verdict == "EMPTY":
            verbosity = 1
        if self.training:
            yield self.training_line()
        for model, rows in by_model(self.checks):
            yield from _check_lines(model, rows, verbosity, self.subjects.get(model, ""))
        for section in _SECTIONS[1:]:
            rows = [row for row in getattr(self, section) if verbosity >= 0 or is_finding(section, row)]
            if rows:
                yield section
            for row in rows:
                yield from (f"  {line}" for line in _record_lines(section, row))
        yield self.summary()

    def markdown(self) -> str:
        """Return the report as Markdown."""
        blocks = [f"# stackwise report\n\n**{self.summary()}**"]
        blocks.append(f"{self.created}, stackwise {version('stackwise')}")
        if self.environment:
            blocks.append("\n".join(f"- {key}: {value}" for key, value in self.environment.items()))
        if self.training:
            blocks.append(f"## Training\n\n{self.training_line()}")
        for model, rows in by_model(self.checks):
            asked, not_asked = asked_and_not(rows)
            table = [
                [
                    MARKS[row["status"]],
                    row["check"],
                    number_text(row["value"]),
                    number_text(row["limit"]),
                    check_text(row),
                ]
                for row in asked
            ]
            table += [[MARKS["not applicable"], names, "", "", words] for words, names in not_asked.items()]
            header = ["", "check", "measured", "limit", "details"]
            notes = f"{self.subjects[model]}\n\n" if model in self.subjects else ""
            blocks.append(f"## Checks of {model}\n\n{notes}{markdown_table(header, table)}")
        blocks += [
            f"## {section.capitalize()}\n\n{markdown_table(*record_table(section, rows))}"
            for section in _SECTIONS[1:]
            if (rows := getattr(self, section))
        ]
        if self.failed_tests:
            blocks.append(
                f"## Failed {self.noun}s\n\n" + "\n".join(f"- `{name}`" for name in self.failed_tests)
            )
        return "\n\n".join(blocks) + "\n"

    def to_dict(self) -> dict[str, Any]:
        """Return plain values. In a file, NaN and infinities are the strings "nan", "inf" and "-inf"."""
        values = {each.name: getattr(self, each.name) for each in fields(self)}
        return {"stackwise": version("stackwise"), "verdict": self.verdict, **values}

    def write(self, path: str | Path) -> None:
        """Write Markdown, JSON or HTML, by the suffix of `path`. The write is atomic.

        Raises:
            ValueError: the suffix is none of these.
            OSError: the file cannot be written.
        """
        path = Path(path)
        match path.suffix:
            case ".md":
                text = self.markdown()
            case ".json":
                text = json.dumps(_plain(self.to_dict()), indent=1, allow_nan=False) + "\n"
            case ".html":
                from stackwise.report.html import report_page

                text = report_page(self).html()
            case _:
                raise ValueError(f"report: got {path.name!r}; allowed endings: .md, .json, .html")
        write_whole(path, text)

    @classmethod
    def from_json(cls, path: str | Path) -> Self:
        """Read a .json file that `write` wrote.

        Raises:
            ValueError: the file is not a report. The message names the file and the key.
            OSError: the file cannot be read.
        """
        from pydantic import TypeAdapter, ValidationError

        stored = parse_json(Path(path).read_bytes())
        require(isinstance(stored, dict), str(path), type(stored).__name__, "a report, a JSON object")
        try:
            known = {key: stored[key] for key in cls.__dataclass_fields__ if key in stored}
            return TypeAdapter(cls).validate_python(known)
        except ValidationError as error:
            [first, *_] = error.errors()
            key = ".".join(map(str, first["loc"]))
            raise ValueError(f"{path}: {key}: got {first['input']!r:.200}; {first['msg']}") from None


def training_record(
    result: Mapping[str, Any], validation_loss: float | None = None, predicted: str = "byte"
) -> dict[str, Any]:
    """Return the value of `Report.training` for a training run.

    Args:
        result: result of `ArchitectureTrainer.train_architecture`.
        validation_loss: in nats per predicted unit. None: not measured.
        predicted: the unit that the model predicts, such as "byte" or "token".
    """
    records = result["records"]
    return {
        "parameters": result["parameters"],
        "num_batches": result["num_batches"],
        "seconds": result["seconds"],
        "tokens_per_second": result["tokens_per_second"],
        "first_loss": records[0].loss if records else math.nan,
        "final_loss": result["final_loss"],
        "validation_loss": validation_loss,
        "predicted": predicted,
        "records": [record.to_dict() for record in records],
        "alarms": [alarm.to_dict() | {"text": str(alarm)} for alarm in result.get("alarms", ())],
    }


def _check_lines(model: str, rows: list[dict[str, Any]], verbosity: int, notes: str = "") -> Iterator[str]:
    """Yield the lines for the checks of a model, with a heading if there are any."""
    findings = [row for row in rows if is_finding("checks", row)]
    asked, not_asked = asked_and_not([row for row in rows if not is_finding("checks", row)])
    if verbosity <= 0:
        declared = ("expected failure", "accepted warning") if verbosity == 0 else ()
        asked, not_asked = [row for row in asked if row["status"] in declared], {}
    if not (findings or asked or not_asked):
        return
    yield f"checks of {model}"
    if verbosity > 0 and notes:
        yield f"  {notes}"
    for row in sorted(findings, key=lambda row: row["status"] == "warned"):
        measured = f"  measured {measured_text(row)}" if measured_text(row) else ""
        yield f"  {MARKS[row['status']]:5} {row['check']}{measured}"
        for text in finding_texts(row):
            indent = " " * 8
            yield from textwrap.wrap(
                text, _WIDTH, initial_indent=indent, subsequent_indent=indent, break_on_hyphens=False
            )
    yield from _aligned_lines(asked)
    for words, names in not_asked.items():
        yield f"  {MARKS['not applicable']:5} {names}  {words}".rstrip()


def _aligned_lines(rows: list[dict[str, Any]]) -> Iterator[str]:
    """Yield a line for each check, with aligned columns."""
    width = max((len(row["check"]) for row in rows), default=0)
    wide = max((len(measured_text(row)) for row in rows), default=0)
    for row in rows:
        text = f"{measured_text(row):{wide}}  {check_text(row)}" if wide else check_text(row)
        yield f"  {MARKS[row['status']]:5} {row['check']:{width}}  {text}".rstrip()


def _record_lines(section: str, row: dict[str, Any]) -> list[str]:
    """Return a record as lines of a terminal. Records of checks have `_check_lines`."""
    match section:
        case "stability":
            alarms = [f"{'':13} {alarm['text']}" for alarm in row["alarms"][:3]]
            return [f"{row['verdict']:13} {row['model']}  {fault_text(row)}", *alarms]
        case "throughput":
            test = f"{row['test']}  " if row.get("test") else ""
            notes = [f"  note: {note}" for note in row.get("notes") or ()]
            return [f"{test}{row['model']}  {shape_text(row)}  {rate_text(row)}", *notes]
        case "memory":
            growth = [f"{'':11}  {line}" for line in growth_lines(row)]
            return [f"{row['verdict']:11}  {row['test']}  {memory_text(row)}", *growth]
    return [f"{row['verdict']:12}  {row['test']}  {row['task']}: {row['reason']}"]


def report_files(path: str | Path) -> list[Path]:
    """Return the files to write for `path`: itself, or one of each kind if it has no ending.

    The folder is created.

    Raises:
        ValueError: an ending other than .md, .json or .html.
        OSError: the folder cannot be created.
    """
    path = Path(path)
    allowed = f"a name ending in {', '.join(_ENDINGS)}, or without an ending"
    require(path.suffix in (*_ENDINGS, ""), "report", str(path), allowed)
    path.parent.mkdir(parents=True, exist_ok=True)
    return [path] if path.suffix else [path.with_suffix(ending) for ending in _ENDINGS]


def _plain(value: Any) -> Any:
    """Return the value with non-finite numbers as text, because JSON has no numbers for them."""
    match value:
        case dict():
            return {key: _plain(item) for key, item in value.items()}
        case list() | tuple():
            return [_plain(item) for item in value]
        case float() if not math.isfinite(value):
            return str(value)
    return value
