"""`python -m bench.gate.table`: what `bench.gate` wrote, as tables in the pages and as curves.

The curves move the threshold of each rule: alarms where nothing was changed, against changes that were found.
They come of the runs, and go beside the results, as gate-2-percent.svg and gate-5-percent.svg.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bench.claim import RESULTS
from bench.gate.effects import EFFECTS
from bench.gate.findings import FLAGGED, curves
from bench.gate.rates import Point, Rate
from bench.gate.runs import Run, RunLog
from bench.gate.tools import OURS
from bench.marked_tables import ROOT, Record, bar_rows, recorded, replaced

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["MARKS", "draw", "rates", "rates_in_short", "written"]

_FOLDER = RESULTS / "cpu"
# Of each tool the rule that README.md shows: that of its documentation, or its best-known one.
_IN_SHORT = (
    (OURS, "gate"),
    ("pytest-benchmark", "mean:5%"),
    ("pytest-benchmark", "stored, mean:5%"),
    ("asv continuous", "factor 1.1"),
    ("pyperf", "significant"),
    ("codspeed walltime", "min:10%"),
)
_DRAWN = {"up02": "gate-2-percent.svg", "up05": "gate-5-percent.svg"}


def rates(record: Record) -> str:
    """One row a rule: alarms by condition, what is found by effect, what is not decided, seconds."""
    return _rows(record["figures"]["rules"])


def rates_in_short(record: Record) -> str:
    """The same, one or two rules a tool."""
    rules = {(row["tool"], row["rule"]): row for row in record["figures"]["rules"]}
    return _rows([rules[names] for names in _IN_SHORT if names in rules])


def _rows(rules: Sequence[Mapping[str, Any]]) -> str:
    effects = [branch for branch, effect in EFFECTS.items() if effect.share]
    head = [
        "",
        "false alarms",
        *(f"finds +{EFFECTS[branch]}" for branch in effects),
        "inconclusive",
        "s/test",
    ]
    lines = [f"| {' | '.join(head)} |", "| --- " + "| ---: " * (len(head) - 1) + "|"]
    for row in rules:
        name = f"{row['tool']}, {row['rule']}"
        if row["tool"] == OURS:
            name = f"**stackwise{', before its confirmation' if row['rule'] == FLAGGED else ''}**"
        unsaid = [Rate.of(each["hits"], each["n"]) for each in row["inconclusive"].values()]
        total = Rate.of(sum(each.hits for each in unsaid), sum(each.n for each in unsaid))
        cells = [
            _interval(row["rates"]["same"]),
            *(_share(row["rates"][branch]) for branch in effects),
            _share(total.to_dict()),
            f"{row['seconds']:.1f}",
        ]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _share(found: Mapping[str, Any]) -> str:
    return "-" if found["value"] is None else f"{found['value']:.1%}"


def _interval(found: Mapping[str, Any]) -> str:
    if found["value"] is None:
        return "-"
    return f"{found['value']:.1%} [{found['low']:.1%}, {found['high']:.1%}] of {found['n']}"


def ablations(record: Record) -> str:
    """One row a design and condition: the spread and the bias of a round, and what the rule makes of it."""
    if "ablations" not in record["figures"]:
        return "Not measured."
    lines = [
        "| | spread of a round, median of calls | largest bias | flagged | inconclusive |",
        "| --- | ---: | ---: | ---: | ---: |",
    ]
    for condition, of in record["figures"]["ablations"].items():
        for design, found in of["designs"].items():
            calls = list(found["calls"].values())
            spreads = sorted(each["spread"] for each in calls)
            bias = max((each["bias"] for each in calls), key=abs)
            cells = [f"{spreads[len(spreads) // 2]:.2%}", f"{bias:+.2%}"]
            for key in ("flagged", "inconclusive"):
                hits, n = (sum(each[key][count] for each in calls) for count in ("hits", "n"))
                cells.append(str(Rate.of(hits, n)))
            lines.append(f"| {design}, {condition} | {' | '.join(cells)} |")
    return "\n".join(lines)


def draw(runs: list[Run], branch: str, path: Path) -> None:
    """The curves of all rules for one effect, as an SVG that is the same for the same runs.

    Raises:
        ValueError: no block has runs of all tools, with the effect and without.
    """
    import matplotlib as mpl
    from matplotlib.figure import Figure

    found = curves(runs, branch)
    if not found:
        raise ValueError(f"{branch}: no block was come through by all tools, with the effect and without")
    with mpl.rc_context({"svg.hashsalt": "gate", "font.size": 9}):
        figure = Figure(figsize=(7.0, 4.5), layout="constrained")
        axes = figure.add_subplot()
        for (tool, rule), points in found.items():
            _curve(axes, f"{tool}, {rule}", points, ours=tool == OURS)
        axes.set_xscale("symlog", linthresh=0.01)
        axes.set(xlim=(0, 1), ylim=(0, 1.02))
        axes.set(xlabel="alarms where nothing has changed", ylabel=f"found of {EFFECTS[branch]}")
        axes.set_xticks([0, 0.01, 0.1, 1], ["0", "1 %", "10 %", "100 %"])
        axes.legend(loc="lower right", fontsize=7)
        figure.savefig(path, format="svg", metadata={"Date": None})


def _curve(axes: Axes, label: str, points: Sequence[Point], *, ours: bool) -> None:
    x = [point.false_alarms for point in points]
    y = [point.detected for point in points]
    axes.step(x, y, where="post", label=label, linewidth=2.5 if ours else 1.0, zorder=3 if ours else 2)


# page -> mark -> what stands there
MARKS: dict[str, dict[str, Callable[[Record], str]]] = {
    "README.md": {"gate": rates_in_short},
    "docs/reference/gate.md": {"gate bars": bar_rows, "gate rates": rates, "gate ablations": ablations},
}


def written(page: str) -> str:
    """A page's text with its tables anew."""
    record = recorded("gate")
    return replaced(page, {mark: partial(table, record) for mark, table in MARKS[page].items()})


if __name__ == "__main__":
    log = RunLog(_FOLDER / "gate-runs.jsonl").read()
    for branch_name, file_name in _DRAWN.items():
        draw(log, branch_name, _FOLDER / file_name)
    for page_name in MARKS:
        (ROOT / page_name).write_text(written(page_name))
