"""HTML page of a gate run: regressions first, with paired differences per round."""

from __future__ import annotations

import math
import shlex
from typing import TYPE_CHECKING

from stackwise.gate.report import change_text, each_cost, interval_text, summary, tolerance_text
from stackwise.gate.result import GateResult, Outcome, TestResult, TrialResult
from stackwise.gate.verdict import WORST_FIRST, Verdict
from stackwise.report.page import Finding, Page, Row, Section, Status, Table, findings_section
from stackwise.report.plot import (
    ACCENT,
    BAD,
    GOOD,
    INK,
    MUTED,
    WARN,
    Plot,
    draw_legend,
    label_text,
    style_axes,
)

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["gate_page"]

_MOST_ROWS, _MOST_PLOTS = 40, 12
_TOO_FAR = 5  # tolerances above this multiple of the largest change are not drawn
_STATUSES: dict[Outcome, Status] = {
    "failed": "failed",
    "error": "failed",
    "inconclusive": "warning",
    "warned": "warning",
    "passed": "passed",
}
_COLOURS = {Verdict.REGRESSED: BAD, Verdict.INCONCLUSIVE: WARN, Verdict.IMPROVED: GOOD, Verdict.PASS: ACCENT}
_ADVICE = {
    Verdict.INCONCLUSIVE: "Give the gate more time, or use a less busy machine.",
    Verdict.REGRESSED: "If the higher cost is intended, raise the tolerance with the test's marker `gate`.",
}


def gate_page(result: GateResult) -> Page:
    """Return the page of a gate: failures, inconclusive tests, plots of the rounds, table of all tests."""
    status: Status = _STATUSES[result.outcome]
    findings: dict[Status, list[Finding]] = {"failed": [], "warning": []}
    for test in result.findings:
        kind = _STATUSES[test.outcome(result.missing)]
        if kind in findings:
            findings[kind].append(_finding(result, test, kind))
    titles: dict[Status, str] = {"failed": "Failed tests", "warning": "Inconclusive tests and warnings"}
    sections = [findings_section(titles[kind], found) for kind, found in findings.items() if found]
    sections += [_differences(result), _tests(result)]
    return Page(
        f"Performance of {result.head} against {result.base}",
        result.verdict,
        status,
        summary(result).removeprefix(f"{result.verdict}: "),
        [section for section in sections if section.plots or section.tables or section.findings],
        result.environment,
    )


def _finding(result: GateResult, test: TestResult, status: Status) -> Finding:
    wrong = {metric: trial for metric, trial in test.trials.items() if not trial.decision.verdict.ok}
    reasons = [f"{metric}: {trial.decision.reason}" for metric, trial in wrong.items()]
    verdicts = [trial.decision.verdict for trial in wrong.values()]
    return Finding(
        status,
        test.nodeid,
        label=str(test.verdict) if test.trials else test.status,
        message="\n".join(reasons) or test.detail,
        where=f"{test.file}:{test.line}" if test.file and test.line else "",
        evidence="; ".join(
            _evidence(test, metric, trial)
            for metric, trial in wrong.items()
            if math.isfinite(trial.decision.estimate)
        ),
        advice=_ADVICE[max(verdicts, key=list(_ADVICE).index)] if verdicts else "",
        command="" if test is result.suite else _command(result, test),
    )


def _evidence(test: TestResult, metric: str, trial: TrialResult) -> str:
    costs = " -> ".join(filter(None, each_cost(test, metric, trial)))
    parts = (costs, f"{change_text(trial)} {interval_text(trial)}", f"tolerance {tolerance_text(trial)}")
    return f"{metric} {', '.join(filter(None, parts))}"


def _command(result: GateResult, test: TestResult) -> str:
    """Return the shell command that repeats a test, or "" if both sides are files of saved results."""
    if any(note.startswith("stored:") for note in result.notes):
        return ""
    # "main (0123abcde)" is a branch and its commit. The working tree is the head without a name.
    base, head = (name.partition(" (")[0] for name in (result.base, result.head))
    heads = [] if head.startswith("working tree") else [head]
    return shlex.join(["stackwise", "gate", base, *heads, "--tests", test.nodeid])


def _differences(result: GateResult) -> Section:
    """Return the plots: all tests on one axis, and the rounds of each test, findings first."""
    trials = [
        (test, metric, trial)
        for test in result.findings
        for metric, trial in test.trials.items()
        if math.isfinite(trial.decision.estimate)
    ]
    trials.sort(key=lambda each: WORST_FIRST.index(each[2].decision.verdict))
    plots = [_overview(trials[:_MOST_ROWS])] if len(trials) > 1 else []
    with_rounds = [each for each in trials if _varies(each[2])]
    plots += [_rounds(*each, _trial_status(result, each[0], each[2])) for each in with_rounds[:_MOST_PLOTS]]
    left_out = len(with_rounds) - _MOST_PLOTS
    notes = [f"{left_out} more plots are not shown; the JSON report has their rounds."] * (left_out > 0)
    return Section("Paired differences", plots=plots, notes=notes)


def _varies(trial: TrialResult) -> bool:
    """Return False if a plot of the rounds would be empty: one round, or memory without any change."""
    differences = trial.differences
    return len(differences) > 1 and max(map(abs, differences)) > 1e-9


def _trial_status(result: GateResult, test: TestResult, trial: TrialResult) -> Status:
    return "passed" if trial.decision.verdict.ok else _STATUSES[test.outcome(result.missing)]


def _overview(trials: list[tuple[TestResult, str, TrialResult]]) -> Plot:
    farthest = max(map(_farthest, (trial for _, _, trial in trials)))

    def draw(figure: Figure) -> None:
        axes = figure.subplots()
        for place, (_, _, trial) in enumerate(trials):
            estimate, (low, high) = 100 * trial.decision.estimate, _interval(trial)
            axes.errorbar(
                [estimate],
                [place],
                xerr=[[estimate - low], [high - estimate]],
                fmt="o",
                color=_COLOURS[trial.decision.verdict],
                capsize=3,
                label=str(trial.decision.verdict),
            )
            if 100 * trial.tolerance < _TOO_FAR * farthest:
                axes.plot(
                    [100 * trial.tolerance],
                    [place],
                    "|",
                    color=BAD,
                    markersize=12,
                    markeredgewidth=2,
                    label="tolerance",
                )
        axes.axvline(0, color=INK, linewidth=0.8)
        names = [label_text(f"{test.nodeid}: {metric}") for test, metric, _ in trials]
        axes.set_yticks(range(len(trials)), names)
        axes.set_ylim(len(trials) - 0.5, -0.5)
        axes.set_xlabel("change from base to head [%]")
        style_axes(figure)
        named = dict(zip(*reversed(axes.get_legend_handles_labels()), strict=True))
        draw_legend(figure, list(named.values()), list(named))

    caption = "Dots: estimates. Lines: intervals. Red bars: tolerances."
    return Plot("Change by test and metric", draw, 1.2 + 0.28 * len(trials), caption)


def _rounds(test: TestResult, metric: str, trial: TrialResult, status: Status) -> Plot:
    decision = trial.decision
    is_near = 100 * trial.tolerance < _TOO_FAR * _farthest(trial)

    def draw(figure: Figure) -> None:
        from matplotlib.ticker import MaxNLocator

        axes = figure.subplots()
        values = [100 * math.expm1(difference) for difference in trial.differences]
        level = f"interval at {100 * decision.level:.4g} %"
        axes.axhspan(*_interval(trial), color=ACCENT, alpha=0.18, linewidth=0, label=level)
        axes.axhline(100 * decision.estimate, color=ACCENT, linewidth=1.4, label="estimate")
        if is_near:
            axes.axhline(100 * trial.tolerance, color=BAD, linestyle="--", linewidth=1.4, label="tolerance")
        axes.axhline(0, color=MUTED, linewidth=0.8)
        axes.plot(range(1, len(values) + 1), values, "o", color=INK, markersize=4, label="round")
        axes.set_xlabel("round")
        axes.set_ylabel("head against base [%]")
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        style_axes(figure)
        draw_legend(figure, *axes.get_legend_handles_labels())

    title = f"{decision.verdict}: {metric} of {test.nodeid}"
    caption = "One dot is the paired difference of one round."
    if decision.confirmed:
        caption += " Estimate and interval are from the rounds that confirmed the result."
    if not is_near:
        caption += f" The tolerance ({tolerance_text(trial)}) is outside of the plot."
    return Plot(title, draw, 2.6, caption, status)


def _interval(trial: TrialResult) -> tuple[float, float]:
    """Return the ends of the interval in percent, or the estimate twice if it has no ends."""
    low, high = trial.decision.low, trial.decision.high
    if not (math.isfinite(low) and math.isfinite(high)):
        low = high = trial.decision.estimate
    return 100 * low, 100 * high


def _farthest(trial: TrialResult) -> float:
    """Return the largest change of a trial in percent, at least 1."""
    changes = (100 * math.expm1(difference) for difference in trial.differences)
    return max(1.0, *map(abs, (*_interval(trial), *changes)))


def _tests(result: GateResult) -> Section:
    header = ["test", "metric", "base", "head", "change", "interval", "tolerance", "rounds"]
    rows = []
    for test in result.findings:
        if not test.trials:
            rows.append(Row([test.nodeid, *[""] * 7], _STATUSES[test.outcome(result.missing)], test.status))
        for metric, trial in test.trials.items():
            texts = (change_text(trial), interval_text(trial), tolerance_text(trial))
            cells = [test.nodeid, metric, *each_cost(test, metric, trial), *texts, str(trial.decision.rounds)]
            rows.append(Row(cells, _trial_status(result, test, trial), str(trial.decision.verdict)))
    notes = [f"Seed {result.seed}.", *result.notes]
    if result.order_bias is not None and math.isfinite(result.order_bias):
        bias = f"The first side of a pair differs by {result.order_bias:+.2%}. Random order cancels this."
        notes.insert(0, bias)
    tables = [Table("All tests", header, rows, right=header[2:])] if rows else []
    return Section("All tests", tables=tables, notes=notes)
