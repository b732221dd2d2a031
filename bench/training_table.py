"""`python -m bench.training_table`: what the benches of the trainer wrote, put into docs/ between marks."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from statistics import mean, stdev

from bench.locality import BUDGETS, RACKWISE, RECIPES, losses, trains_all
from bench.marked_tables import ROOT, Record, bar_rows, recorded, replaced

__all__ = ["MARKS", "written"]


def locality(record: Record) -> str:
    """One row a recipe: validation losses by budget, and its price at the largest."""
    runs, largest = record["figures"]["runs"], BUDGETS[-1]
    budgets = " | ".join(f"{tokens / 1e6:g}M tokens" for tokens in BUDGETS)
    rows = [f"| | {budgets} | / rackwise | FLOPs | CPU time |", "| --- " + "| ---: " * 6 + "|"]
    of_largest = {
        recipe: [run for run in runs.values() if (run["recipe"], run["tokens"]) == (recipe, largest)]
        for recipe in RECIPES
    }
    whole = of_largest[RACKWISE]
    for recipe, last in of_largest.items():
        every = (losses(runs, recipe, tokens) for tokens in BUDGETS)
        cells = [f"{mean(found):.3f} ± {stdev(found):.3f}" for found in every]
        cells.append(f"{mean(losses(runs, recipe, largest)) / mean(losses(runs, RACKWISE, largest)):.3f}")
        for price in ("flops", "cpu_seconds"):
            times = mean(r[price] for r in last) / mean(r[price] for r in whole)
            cells.append(f"{times:.2f}")
        mark = "" if recipe.startswith(RACKWISE) or not trains_all(recipe) else " *"
        rows.append(f"| {recipe}{mark} | {' | '.join(cells)} |")
    return "\n".join(rows)


def memory(record: Record) -> str:
    """One row a run: what it takes and what it costs."""
    rows = ["| | peak, GB | disk, GB | seconds | TFLOP | parameters |", "| --- " + "| ---: " * 5 + "|"]
    for name, run in record["figures"]["runs"].items():
        cells = [f"{run['peak_bytes'] / 1e9:.2f}", f"{run['disk_bytes'] / 1e9:.2f}"]
        cells += [f"{run['seconds']:.0f}", f"{run['flops'] / 1e12:.1f}", f"{run['parameters'] / 1e6:,.0f} M"]
        rows.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(rows)


def recompute(record: Record) -> str:
    """One row a kind: memory and throughput as a part of those without recomputation, by attention."""
    figures = record["figures"]
    cases = [name.removesuffix(": throughput") for name in figures if name.endswith("6: throughput")]
    cases = [case for case in cases if "compiled" not in case]
    rows = [f"| of none's | {' | '.join(cases)} |", "| --- " + "| ---: " * len(cases) + "|"]
    for kind in figures[f"{cases[0]}: memory"]:
        if kind == "none":
            continue
        cells = []
        for case in cases:
            held, peak = (figures[f"{case}: memory"][kind][key] for key in ("held", "peak"))
            rate = figures[f"{case}: throughput"]["of_none"][kind]["median"]
            cells.append(f"{held:.2f}, {peak:.2f}, {rate:.2f}")
        rows.append(f"| {kind} | {' | '.join(cells)} |")
    return "\n".join(rows)


def overhead(record: Record) -> str:
    """One row a step that keeps something, of each shape."""
    rows = ["| | times the step without | middle half of rounds |", "| --- | ---: | ---: |"]
    for bar in record["bars"]:
        kind, _, shape = bar["name"].partition(" ")
        ratios = record["figures"][bar["name"]]["times_plain"]
        for name in ("trainer", "bare again") if kind == "trainer" else ("monitored", "items"):
            each = ratios[name]
            middle = f"{each['quartile_low']:.3f} to {each['quartile_high']:.3f}"
            rows.append(f"| {name}, {shape} | {each['median']:.3f} | {middle} |")
    return "\n".join(rows)


# Of each page the tables by their marks, and what each is made of.
MARKS: dict[str, dict[str, tuple[Callable[[Record], str], str]]] = {
    "docs/reference/training.md": {
        "locality": (locality, "locality"),
        "bars of locality": (bar_rows, "locality"),
    },
    "docs/reference/memory.md": {"memory": (memory, "memory"), "bars of memory": (bar_rows, "memory")},
    "docs/reference/recompute.md": {"recompute": (recompute, "recompute")},
    "docs/reference/telemetry.md": {"overhead": (overhead, "overhead")},
}


def written(page: str) -> str:
    """A page's text with its tables anew."""
    return replaced(
        page, {mark: partial(table, recorded(name)) for mark, (table, name) in MARKS[page].items()}
    )


if __name__ == "__main__":
    for page_name in MARKS:
        (ROOT / page_name).write_text(written(page_name))
