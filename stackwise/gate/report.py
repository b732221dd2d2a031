"""Report: result of a gate for a terminal, a job summary, a forge or a program."""

from __future__ import annotations

import hashlib
import json
import math
import os
import statistics
import textwrap
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from stackwise.gate.result import GateResult, Outcome, TestResult, TrialResult
from stackwise.gate.tree import NOTHING_DIFFERS
from stackwise.gate.verdict import WORST_FIRST, Verdict
from stackwise.support.arguments import require
from stackwise.support.files import write_whole
from stackwise.support.markdown import markdown_table
from stackwise.support.units import byte_text, time_text

__all__ = [
    "CODE_QUALITY",
    "change_text",
    "code_quality",
    "counted",
    "each_cost",
    "github_annotations",
    "interval_text",
    "junit_properties",
    "markdown",
    "publish",
    "short_text",
    "summary",
    "terminal_lines",
    "test_text",
    "tolerance_text",
    "write_report",
]

CODE_QUALITY = ".codequality.json"

# Title in a page, level of an annotation of GitHub, and severity for GitLab, from the most severe outcome.
_FINDINGS: dict[Outcome, tuple[str, str, str]] = {
    "failed": ("Failed", "error", "major"),
    "error": ("Set-up errors", "error", "major"),
    "inconclusive": ("Inconclusive", "warning", "minor"),
    "warned": ("Warnings", "warning", "info"),
}
# GitHub shows ten annotations of a level per step, and silently drops the rest.
_MOST_ANNOTATIONS = 10
_LEAST_NAME = 20  # characters of a test's name
_LONGEST_REASON = 300  # characters: the output of a process may have thousands


def test_text(test: TestResult) -> str:
    """Return a line for each metric of a test, the worst first, or the reason why it was not measured."""
    if not test.trials:
        return f"{test.status}: {test.detail}" if test.detail else test.status
    return "\n".join(_trial_text(test, *each) for each in _worst_first(test))


test_text.__test__ = False  # type: ignore[attr-defined] # otherwise pytest treats it as a test


def short_text(test: TestResult) -> str:
    """Return change and limit of each regressed metric, or of the worst one; otherwise the reason."""
    if not test.trials:
        return _one_line(test_text(test))
    trials = _worst_first(test)
    regressed = [each for each in trials if each[1].decision.verdict is Verdict.REGRESSED]
    return ", ".join(_change_and_limit(*each) for each in regressed or trials[:1])


def _change_and_limit(metric: str, trial: TrialResult) -> str:
    if not trial.differences:
        return f"{metric}: {_one_line(trial.decision.reason)}"
    is_worse = trial.decision.verdict is Verdict.REGRESSED
    interval = f" {interval_text(trial)}" if trial.decision.verdict is Verdict.INCONCLUSIVE else ""
    return f"{metric} {change_text(trial)}{interval}{' >' if is_worse else ', limit'} {tolerance_text(trial)}"


def terminal_lines(result: GateResult, *, verbose: bool = False, width: int = 80) -> list[str]:
    """Return a line for each test, the notes, and a summary line.

    Args:
        result: result of the gate. Tests that were not begun are only counted in the summary line.
        verbose: True for a line per metric of each test, with costs, interval and rounds, of any length.
        width: maximum length of the line of a measured test. Names are shortened at their start.
    """
    tests = [test for test in result.findings if test.status != "not begun"]
    rows = [row for test in tests for row in (_rows(test) if verbose else [_short_row(test)])]
    last = 4 if verbose else 2
    widths = [max((len(row[column]) for row in rows), default=0) for column in range(last)]
    if not verbose and rows:
        longest = max((len(row[2]) for row, test in zip(rows, tests, strict=True) if test.trials), default=0)
        widths[1] = min(widths[1], max(_LEAST_NAME, width - widths[0] - longest - 4))
        rows = [(row[0], _shortened(row[1], widths[1]), row[2]) for row in rows]
    lines = [
        "  ".join([*(cell.ljust(each) for cell, each in zip(row, widths, strict=False)), row[last]]).rstrip()
        for row in rows
    ]
    return [*lines, *result.notes, *_advice(result), summary(result)]


def markdown(result: GateResult) -> str:
    """Return a Markdown page: failed and undecided tests first, then a table of all tests."""
    blocks = [f"## Performance of {result.head} against {result.base}: {result.verdict}", summary(result)]
    for outcome, (title, _, _) in _FINDINGS.items():
        tests = [test for test in result.findings if test.outcome(result.missing) == outcome]
        if tests:
            told = "\n".join(f"- `{test.nodeid}`: {_finding(test)}" for test in tests)
            blocks.append(f"### {title}\n\n{told}")
    header = ["", "test", "metric", "base", "head", "change", "interval", "tolerance", "rounds"]
    table = [row for test in result.findings for row in _table_rows(test)]
    if table:
        blocks.append(markdown_table(header, table))
    if result.notes:
        blocks.append("\n".join(f"- {note}" for note in result.notes))
    details = [f"{counted(result.rounds, 'round')} in {result.seconds:.0f} s, seed {result.seed}"]
    if result.order_bias is not None and math.isfinite(result.order_bias):
        details.append(
            f"The first side of a pair differs by {result.order_bias:+.2%}, which the random order cancels"
        )
    blocks.append(". ".join(details) + ".")
    return "\n\n".join(blocks) + "\n"


def github_annotations(result: GateResult) -> list[str]:
    """Return workflow commands of GitHub at the lines of the tests: errors for failures, otherwise warnings.

    GitHub shows ten of a level. If a level has more, its last command has the number of omitted ones.
    """
    found: dict[str, list[str]] = {"error": [], "warning": []}
    for test in result.findings:
        outcome = test.outcome(result.missing)
        if outcome in _FINDINGS:
            _, level, _ = _FINDINGS[outcome]
            where = {"file": test.file, "line": str(test.line)} if test.file and test.line else {}
            title = f"{test.verdict if test.trials else test.status}: {test.nodeid}"
            found[level].append(_command(level, test_text(test), title=title, **where))
    lines = []
    for level, commands in found.items():
        left = len(commands) - _MOST_ANNOTATIONS
        if left > 0:
            rest = _command(level, f"{left + 1} tests more, see the summary", title="gate")
            commands = [*commands[: _MOST_ANNOTATIONS - 1], rest]
        lines += commands
    return lines


def junit_properties(test: TestResult) -> list[tuple[str, str]]:
    """Return names and values for `user_properties`, which pytest writes into JUnit files.

    Numbers are shares or have the metric's own unit, so that a program can read them.
    """
    if not test.trials:
        return [("gate", test.status)]
    found = [("gate", str(test.verdict))]
    for metric, trial in test.trials.items():
        decision = trial.decision
        values: dict[str, float | str] = {
            "verdict": str(decision.verdict),
            "change": decision.estimate,
            "low": decision.low,
            "high": decision.high,
            "rounds": decision.rounds,
            "base": statistics.median(trial.base) if trial.base else math.nan,
            "head": statistics.median(trial.head) if trial.head else math.nan,
        }
        found += [
            (f"gate_{metric}_{name}", f"{value:.6g}" if isinstance(value, float) else str(value))
            for name, value in values.items()
            if not isinstance(value, float) or math.isfinite(value)
        ]
    if (rates := test.tokens_per_second) is not None:
        sides = zip(("base", "head"), rates, strict=True)
        found += [(f"gate_tokens_per_second_{side}", f"{rate:.6g}") for side, rate in sides]
    return found


def code_quality(result: GateResult) -> list[dict[str, Any]]:
    """Return the findings in the format of GitLab's code quality reports, for the view of a merge request."""
    return [
        {
            "description": f"{test.nodeid}: {_finding(test)}",
            "check_name": "stackwise gate",
            # Constant while the problem persists, so that GitLab recognizes the finding.
            "fingerprint": hashlib.sha256(f"{test.nodeid}\n{test.status}".encode()).hexdigest(),
            "severity": _FINDINGS[outcome][2],
            "location": {"path": test.file or test.nodeid.partition("::")[0], "lines": {"begin": line}},
        }
        for test in result.findings
        if (outcome := test.outcome(result.missing)) in _FINDINGS and (line := max(1, test.line))
    ]


def write_report(result: GateResult, path: Path) -> None:
    """Write the result in the format of the suffix of `path`. The write is atomic.

    Args:
        result: result of the gate.
        path: `.md`, `.html`, `.codequality.json` (for GitLab), or any other `.json` (the complete result, as
            `GateResult.from_dict` reads it).

    Raises:
        ValueError: another suffix.
        OSError: the file cannot be written.
    """
    allowed = f".md, .json, .html, {CODE_QUALITY}"
    require(path.suffix in (".md", ".json", ".html"), "report", path.name, allowed)
    if path.suffix == ".md":
        text = markdown(result)
    elif path.suffix == ".html":
        from stackwise.gate.page import gate_page

        text = gate_page(result).html()
    elif path.name.endswith(CODE_QUALITY):
        text = json.dumps(code_quality(result), indent=1) + "\n"
    else:
        text = json.dumps(result.to_dict(), indent=1, allow_nan=False) + "\n"
    write_whole(path, text)


def publish(result: GateResult, paths: Iterable[Path] = ()) -> list[str]:
    """Write the requested reports and, in a job of GitHub, its summary.

    Args:
        result: result of the gate.
        paths: paths of reports, see `write_report`.

    Returns:
        lines for the output: the written files, and the annotations, which GitHub reads from the output.
    """
    lines = []
    for path in paths:
        write_report(result, path)
        lines.append(f"gate: wrote {path}")
    page = os.environ.get("GITHUB_STEP_SUMMARY")
    if page:
        with Path(page).open("a", encoding="utf-8") as file:
            file.write(markdown(result))
    if os.environ.get("GITHUB_ACTIONS") == "true":
        lines += github_annotations(result)
    return lines


def _advice(result: GateResult) -> list[str]:
    """Return a hint if tests were measured and not decided."""
    undecided = [t for t in result.tests if t.trials and t.verdict is Verdict.INCONCLUSIVE]
    if result.verdict != "INCONCLUSIVE" or not undecided or NOTHING_DIFFERS in result.notes:
        return []
    return ["INCONCLUSIVE tests: give more time (--stackwise-gate-seconds), or use a quieter machine"]


def summary(result: GateResult) -> str:
    """Return the verdict, both sides and the number of tests of each verdict, in one line."""
    counts = Counter(str(test.verdict) if test.trials else test.status for test in result.tests)
    told = ", ".join(f"{number} {name}" for name, number in sorted(counts.items())) or "no tests"
    told = told if result.compared else f"nothing was compared: {told}"
    if result.suite is not None:
        told = f"{told}, all tests together {result.suite.verdict}"
    rounds = counted(result.rounds, "round")
    return (
        f"{result.verdict}: {result.head} against {result.base}: {told}; {rounds} in {result.seconds:.0f} s"
    )


def counted(number: int, noun: str) -> str:
    """Return a number with its noun, such as "1 test" or "3 tests"."""
    return f"{number} {noun}{'' if number == 1 else 's'}"


def _finding(test: TestResult) -> str:
    """Return the problems of a test in one line, without its metrics that passed."""
    wrong = [(metric, trial) for metric, trial in _worst_first(test) if not trial.decision.verdict.ok]
    return _one_line("; ".join(_trial_text(test, *each) for each in wrong) or test_text(test))


def _short_row(test: TestResult) -> tuple[str, ...]:
    """Return verdict, test, and change or reason. A reason is shortened, unless it has a remedy."""
    if not test.trials:
        most = len(test.detail) + 1 if test.status == "set-up error" else _LONGEST_REASON
        return test.status, test.nodeid, textwrap.shorten(test.detail, most, placeholder=" ...")
    return str(test.verdict), test.nodeid, short_text(test)


def _shortened(name: str, width: int) -> str:
    return name if len(name) <= width else f"...{name[3 - width :]}"


def _rows(test: TestResult) -> list[tuple[str, str, str, str, str]]:
    """Return verdict, test, metric, costs, and the remaining text of each metric."""
    if not test.trials:
        return [(test.status, test.nodeid, "", "", _one_line(test.detail))]
    return [
        (
            str(trial.decision.verdict),
            test.nodeid,
            metric,
            _levels(trial),
            f"{change_text(trial)} {interval_text(trial)}  {_rounds(trial)}  {_rates(test, metric)}".rstrip()
            if trial.differences
            else _one_line(trial.decision.reason),
        )
        for metric, trial in test.trials.items()
    ]


def _table_rows(test: TestResult) -> list[list[str]]:
    name = f"`{test.nodeid}`"
    if not test.trials:
        return [[test.status, name, *[""] * 7]]
    return [
        [
            str(trial.decision.verdict),
            name,
            metric,
            *each_cost(test, metric, trial),
            change_text(trial),
            interval_text(trial),
            tolerance_text(trial),
            _rounds(trial),
        ]
        for metric, trial in test.trials.items()
    ]


def _trial_text(test: TestResult, metric: str, trial: TrialResult) -> str:
    decision, rates = trial.decision, _rates(test, metric)
    beside = f" ({rates})" if rates else ""
    costs = f"{_levels(trial)}{beside}, " if _levels(trial) else ""
    return (
        f"{metric} {decision.verdict}: {costs}{change_text(trial)} {interval_text(trial)} at "
        f"{_level(decision.level)}, tolerance {tolerance_text(trial)}: {decision.reason}"
    )


def _level(level: float) -> str:
    """Return the level in percent, with enough digits that a high level is not shown as 100 %."""
    doubt = max(100 * (1 - level), 1e-9)
    return f"{level:.{max(1, -math.floor(math.log10(doubt)))}%}"


def _worst_first(test: TestResult) -> Sequence[tuple[str, TrialResult]]:
    return sorted(test.trials.items(), key=lambda item: WORST_FIRST.index(item[1].decision.verdict))


def _levels(trial: TrialResult) -> str:
    """Return the costs of both sides, or an empty string for a change without costs."""
    return " -> ".join(filter(None, _each_level(trial)))


def _each_level(trial: TrialResult) -> tuple[str, str]:
    if trial.levels is None:
        # All tests together have a change but no costs. The same applies to mixed sides.
        known = math.isfinite(trial.decision.estimate)
        return ("", "") if known else ("not known", "not known")
    base, head = trial.levels
    text = byte_text if trial.unit == "B" else time_text
    return text(base), text(head)


def each_cost(test: TestResult, metric: str, trial: TrialResult) -> list[str]:
    """Return the cost of base and of head, with tokens per second if they are known."""
    rates = _each_rate(test, metric)
    if not rates:
        return list(_each_level(trial))
    return [f"{level} ({rate} tokens/s)" for level, rate in zip(_each_level(trial), rates, strict=True)]


def _rates(test: TestResult, metric: str) -> str:
    """Return the tokens per second of both sides; "" if they are unknown."""
    rates = _each_rate(test, metric)
    return f"{' -> '.join(rates)} tokens/s" if rates else ""


def _each_rate(test: TestResult, metric: str) -> list[str]:
    """Return the tokens per second of base and head for the metric "time"; [] for another metric."""
    rates = test.tokens_per_second if metric == "time" else None
    return [f"{rate:,.0f}" if rate >= 1000 else f"{rate:.4g}" for rate in rates or ()]


def change_text(trial: TrialResult) -> str:
    """Return the estimated change of the cost, in percent."""
    estimate = trial.decision.estimate
    return f"{estimate:+.2%}" if math.isfinite(estimate) else "not known"


def interval_text(trial: TrialResult) -> str:
    """Return the interval of the change, in percent."""
    low, high = trial.decision.low, trial.decision.high
    return f"[{low:+.2%}, {high:+.2%}]" if math.isfinite(low) and math.isfinite(high) else "[not known]"


def tolerance_text(trial: TrialResult) -> str:
    """Return the tolerance in percent, or in the metric's unit if a floor exceeds ten times the cost."""
    if trial.tolerance < 10:
        return f"{100 * trial.tolerance:.3g}%"
    if trial.levels is None:
        return f"{trial.tolerance:,.0%}"
    return (byte_text if trial.unit == "B" else time_text)(trial.tolerance * trial.levels[0])


def _rounds(trial: TrialResult) -> str:
    text = counted(trial.decision.rounds, "round")
    return f"{text}, confirmed" if trial.decision.confirmed else text


def _command(level: str, message: str, **properties: str) -> str:
    """Return a workflow command. Characters that would terminate the command or a property are escaped."""
    texts = [f"{key}={_escaped(value, ':,')}" for key, value in properties.items()]
    return f"::{level} {','.join(texts)}::{_escaped(message)}"


def _escaped(text: str, more: str = "") -> str:
    for character in "%\r\n" + more:
        text = text.replace(character, f"%{ord(character):02X}")
    return text


def _one_line(text: str) -> str:
    return " ".join(text.split())
