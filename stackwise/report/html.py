"""HTML: a Report as a page, with failures first."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from stackwise.report.figures import latency_plot, training_plot
from stackwise.report.page import Finding, Page, Row, Section, Status, Table, findings_section
from stackwise.report.plot import Plot
from stackwise.report.row_text import (
    check_text,
    fault_text,
    growth_lines,
    is_finding,
    memory_text,
    number_text,
    record_table,
    says_something,
    throughput_table,
)

if TYPE_CHECKING:
    from stackwise.report.report import Report

__all__ = ["report_page"]

_MOST_PLOTS = 12  # per section: each takes about 20 kB and 0.3 s
_MOST_ALARMS = 3
_VERDICTS: dict[str, Status] = {"PASS": "passed", "WARN": "warning", "FAIL": "failed"}
_LATENCIES = {
    "call": "Latency of a call",
    "e2e": "Latency of a generation",
    "ttft": "Time to first token",
    "itl": "Inter-token latency",
}


def report_page(report: Report) -> Page:
    """Return the page of a report: verdict, failures, warnings, measurements, and all other checks."""
    models = list(dict.fromkeys(row["model"] for row in report.checks))
    sections = [
        *_failures(report),
        *_warnings(report),
        *_training(report),
        *_stability(report),
        *_throughput(report),
        *_with_verdicts("memory", report),
        *_with_verdicts("quality", report),
        *_other_checks(report),
        *_subjects(report),
    ]
    title = f"{report.noun.title()} run"
    if report.noun == "check" and len(models) == 1:
        title = f"Checks of {models[0]}"
    elif report.training is not None and not any(section for section in sections if section.tables):
        title = "Training run"
    return Page(
        title,
        report.verdict,
        _VERDICTS.get(report.verdict, "warning"),
        report.counts_text(),
        sections,
        report.environment,
        report.created,
    )


def _failures(report: Report) -> list[Section]:
    """Return the sections of failed checks, and of tests that failed for another reason."""
    failed = set(report.failed_tests)
    checks, others, explained = list[Finding](), list[Finding](), set[str]()
    for section, row in report.findings():
        name = report.name_of(row)
        if name in failed:
            explained.add(name)
            (checks if section == "checks" else others).append(_finding(report, section, row, "failed"))
    others += [
        Finding(
            "failed",
            name,
            message=report.errors.get(name, {}).get("message", f"The {report.noun} failed."),
            where=report.errors.get(name, {}).get("where", ""),
            command=report.commands.get(name, ""),
        )
        for name in report.failed_tests
        if name not in explained
    ]
    found = (("Failed checks", checks), ("Failed tests", others))
    return [findings_section(title, findings) for title, findings in found if findings]


def _warnings(report: Report) -> list[Section]:
    failed = set(report.failed_tests)
    findings = [
        _finding(report, section, row, "warning")
        for section, row in report.findings()
        if report.name_of(row) not in failed
    ]
    return [findings_section("Warnings", findings)] if findings else []


def _finding(report: Report, section: str, row: dict[str, Any], status: Status) -> Finding:
    """Return the Finding for a record."""
    test, name = row.get("test", ""), report.name_of(row)
    command = report.commands.get(name, "")
    error = report.errors.get(name, {})
    where = error.get("where", "")
    match section:
        case "checks":
            return Finding(
                status,
                row["check"],
                " in ".join(filter(None, (row["model"], test))),
                row["status"],
                row["meaning"],
                row["where"],
                _evidence(row),
                row["advice"],
                command,
            )
        case "stability":
            stopped = f"The run stopped: {row['stopped']}" if row.get("stopped") else ""
            problems = (row.get("recovery") or {}).get("problems", ())
            details = tuple(filter(None, [stopped, *problems, *_alarm_texts(row)]))
            return Finding(
                status,
                test or row["model"],
                row["model"],
                row["verdict"],
                error.get("message", ""),
                where,
                fault_text(row),
                command=command,
                details=details,
            )
        case "memory":
            grows = row["kind"] == "growth"
            return Finding(
                status,
                test,
                "",
                row["verdict"],
                "Memory grows." if grows else "Peak memory exceeds the limit.",
                where=where,
                evidence=memory_text(row),
                command=command,
                details=tuple(growth_lines(row)),
            )
        case _:
            return Finding(status, test, row["task"], row["verdict"], row["reason"], where, command=command)


def _alarm_texts(run: dict[str, Any]) -> list[str]:
    """Return the first alarms of a run, and the number of remaining alarms."""
    first = [alarm["text"] for alarm in run["alarms"][:_MOST_ALARMS]]
    rest = len(run["alarms"]) - len(first)
    return [*first, f"and {rest} more alarm{'' if rest == 1 else 's'}"] if rest else first


def _evidence(row: dict[str, Any]) -> str:
    value, limit = number_text(row["value"]), number_text(row["limit"])
    return f"measured {value}, limit {limit}" if value and limit else f"measured {value}" if value else ""


def _training(report: Report) -> list[Section]:
    run = report.training
    if run is None:
        return []
    plot = None
    if run.get("records"):
        plot = training_plot("Loss and gradient norm", {"alarms": [], **run})
    notes = [report.training_line().removeprefix("training: ")]
    return [Section("Training", plots=[plot] if plot else [], notes=notes)]


def _stability(report: Report) -> list[Section]:
    if not report.stability:
        return []
    runs = [(row, _status("stability", row, report)) for row in report.stability]
    first = sorted(runs, key=lambda run: run[1] == "passed")
    plots = [
        training_plot(
            f"{row['verdict']}: {row.get('test') or row['model']}",
            row,
            status=status,
            caption=f"{row['model']}, {fault_text(row)}",
        )
        for row, status in first
    ]
    rows = [
        Row(
            [
                row["model"],
                fault_text(row),
                "\n".join(_alarm_texts(row)) or "none",
                row.get("test", ""),
            ],
            status,
            row["verdict"],
        )
        for row, status in runs
    ]
    table = Table(
        "Stability runs",
        ["model", "run and faults", "alarms", "test"],
        rows,
        wide=("run and faults", "alarms"),
    )
    return [_section("Stability runs", [plot for plot in plots if plot], table)]


def _throughput(report: Report) -> list[Section]:
    if not report.throughput:
        return []
    plots = []
    for row in report.throughput:
        for of, found in (row.get("histograms") or {}).items():
            if found is None or not row["measured"]:
                continue
            percentiles = (row.get("latencies") or {}).get(of) or row.get("percentiles")
            mean = row.get("calls_per_sample", 1)
            caption = f"A sample is the mean of {mean} calls." if mean > 1 else ""
            title = f"{_LATENCIES[of]}: {row['model']}, {row['mode']}"
            plots.append(latency_plot(title, found, percentiles, caption=caption))
    header, lines = throughput_table(report.throughput)
    rows = [Row(cells) for cells in lines]
    text = {"test", "model", "workload", "bound", "clock, cache", "execution", "steady", "throttled", "notes"}
    wide = ("workload", "execution", "notes")
    table = Table("Throughput", header, rows, right=set(header) - text, wide=wide)
    return [_section("Throughput", plots, table)]


def _with_verdicts(section: str, report: Report) -> list[Section]:
    """Return the section of a table whose rows have a verdict, or [] without rows."""
    records, title = getattr(report, section), section.capitalize()
    (_, *header), cells = record_table(section, records)
    rows = [
        Row(texts, _status(section, row, report), verdict)
        for (verdict, *texts), row in zip(cells, records, strict=True)
    ]
    return [Section(title, tables=[Table(title, header, rows, wide=("memory", "details"))])] if rows else []


def _section(title: str, plots: Sequence[Plot], table: Table) -> Section:
    notes = [f"The first {_MOST_PLOTS} of {len(plots)} plots are shown."] if len(plots) > _MOST_PLOTS else []
    return Section(title, plots=plots[:_MOST_PLOTS], tables=[table], notes=notes)


def _other_checks(report: Report) -> list[Section]:
    """Return the folded sections: checks that passed, declared findings, and checks that do not apply."""
    by_status: dict[str, list[dict[str, Any]]] = {}
    for row in report.checks:
        by_status.setdefault(row["status"], []).append(row)
    sections = []
    if passed := by_status.get("passed"):
        rows = [
            Row(
                [
                    row["check"],
                    row["model"],
                    number_text(row["value"]),
                    number_text(row["limit"]),
                    row.get("test", ""),
                ],
                "passed",
            )
            for row in passed
        ]
        header = ["check", "model", "measured", "limit", "test"]
        sections.append(_folded("Passed checks", Table("Passed checks", header, rows, ("measured", "limit"))))
    declared = [*by_status.get("expected failure", ()), *by_status.get("accepted warning", ())]
    if declared:
        rows = [
            Row([row["check"], row["model"], check_text(row)], "passed", row["status"]) for row in declared
        ]
        table = Table(
            "Expected failures and accepted warnings", ["check", "model", "finding"], rows, wide=("finding",)
        )
        sections.append(Section(table.title, tables=[table], count=len(rows)))
    if skipped := by_status.get("not applicable"):
        skipped = sorted(skipped, key=check_text)
        rows = [Row([row["check"], row["model"], check_text(row)], "not applicable") for row in skipped]
        table = Table("Checks that do not apply", ["check", "model", "reason"], rows, wide=("reason",))
        sections.append(_folded(table.title, table))
    return sections


def _subjects(report: Report) -> list[Section]:
    """Return the facts that were inferred or assumed about the models."""
    rows = [Row([name, notes]) for name, notes in report.subjects.items()]
    table = Table("Models and training loops", ["name", "notes"], rows, wide=("notes",), results=False)
    return [Section(table.title, tables=[table])] if rows else []


def _folded(title: str, table: Table) -> Section:
    if "test" in table.header and not any(row.cells[-1] for row in table.rows):
        rows = [Row(row.cells[:-1], row.status, row.label) for row in table.rows]
        table = Table(table.title, table.header[:-1], rows, table.right, table.code)
    return Section(title, tables=[table], folded=True, count=len(table.rows))


def _status(section: str, row: dict[str, Any], report: Report) -> Status:
    if is_finding(section, row):
        return "failed" if report.name_of(row) in report.failed_tests else "warning"
    return "passed" if says_something(section, row) and row["verdict"] != "read" else "neutral"
