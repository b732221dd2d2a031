"""`python -m bench.stability_table`: what the benches of guard, checkpoints and leaks wrote, in the pages."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from statistics import mean
from typing import Any

from bench.false_alarms import MODES, alarms_per_1000, is_lost
from bench.growth import SOUND
from bench.healthy_training import HELD_OUT
from bench.marked_tables import ROOT, Record, bar_rows, recorded, replaced
from bench.recovery import ARMS, CONTROLS, FAULTS, OPTIMIZERS, OURS, Found

__all__ = ["MARKS", "written"]

_LOST = 1.0  # nat from its twin: a run that is of no use


def recovery(record: Record) -> str:
    """One row a fault and optimizer: the largest distance from the twin, by what was done about it.

    Other controls than the clean runs are far from their twins whatever is done.
    """
    found = _found(record)
    shared = _shared(found)
    rows = [f"| | {' | '.join(ARMS)} |", "| --- " + "| ---: " * len(ARMS) + "|"]
    for fault in (*FAULTS, "clean"):
        for optimizer in OPTIMIZERS:
            wanted = (optimizer, fault)
            runs = [[r for r in shared[arm] if (r["optimizer"], r["fault"]) == wanted] for arm in ARMS]
            cells = [_distance(found, several) for several in runs]
            rows.append(f"| {fault}, {optimizer} | {' | '.join(cells)} |")
    return "\n".join(rows)


def recovery_in_short(record: Record) -> str:
    """One row a way: faults that it notices at their step, false alarms, and runs that are lost."""
    found = _found(record)
    shared = _shared(found)
    header = ("", "detected at the faulty step", "false alarms per 1,000 healthy steps")
    header += ("runs aborted or off by 1 nat",)
    rows = [f"| {' | '.join(header)} |".replace("|  |", "| |"), "| --- | ---: | ---: | ---: |"]
    for arm in ARMS[:-1]:  # the last one is a variant with equal results
        broken = [r for r in shared[arm] if r["fault"] in FAULTS]
        passing = [r for r in broken if r["fault"] != "x10 all steps"]
        sound = [r for r in shared[arm] if r["fault"] in CONTROLS]
        noticed = mean(r["at"] in r["alarms"] for r in broken)
        false = 1000 * sum(len(r["alarms"]) for r in sound) / (found.steps * len(sound))
        lost = sum(bool(r.get("stopped")) or (found.distance(r) or 0.0) > _LOST for r in passing)
        name = f"**stackwise, {arm}**" if arm == OURS else arm
        rows.append(f"| {name} | {noticed:.0%} | {false:.1f} | {lost} of {len(passing)} |")
    return "\n".join(rows)


def false_alarms(record: Record) -> str:
    """One row per kind of healthy training: alarms per 1,000 steps in each mode, and recomputed steps."""
    healthy = record["figures"]["healthy"]
    rows = [
        "| alarms per 1,000 healthy steps | with `loss_of` | without | recomputed per 1,000 |",
        "| --- | ---: | ---: | ---: |",
    ]
    for kind in dict.fromkeys(run["kind"] for run in healthy.values()):
        rates = [f"{alarms_per_1000(healthy, kind, mode):.2f}" for mode in MODES]
        several = [
            run for run in healthy.values() if run["kind"] == kind and run["mode"] == next(iter(MODES))
        ]
        recomputed = 1000 * sum(run["recomputed"] for run in several) / sum(run["steps"] for run in several)
        mark = r" \*" if kind in HELD_OUT else ""
        rows.append(f"| {kind}{mark} | {' | '.join(rates)} | {recomputed:.1f} |")
    return "\n".join(rows)


def faults_by_mode(record: Record) -> str:
    """One row per fault: noticed at its step, and lost, in each mode."""
    rows = ["| noticed; lost | with `loss_of` | without |", "| --- | ---: | ---: |"]
    for fault in FAULTS:
        cells = []
        for mode in MODES:
            runs = [
                run
                for run in record["figures"]["faults"].values()
                if (run.get("fault"), run.get("mode")) == (fault, mode)
            ]
            noticed = sum(run["noticed"] for run in runs)
            cells.append(f"{noticed} of {len(runs)}; {sum(map(is_lost, runs))}")
        rows.append(f"| {fault} | {' | '.join(cells)} |")
    return "\n".join(rows)


def growth(record: Record) -> str:
    """One row a bar; of leaks, whose bars are shares, how many of them."""
    runs = record["figures"]["runs"]
    leaks = [name for name, run in runs.items() if not name.endswith(f"; {SOUND}") and run["error"] is None]
    rows = []
    for row, bar in zip(bar_rows(record).splitlines()[2:], record["bars"], strict=True):
        if bar["name"].startswith("leaks"):
            row = f"| {bar['name']} | {round(bar['value'] * len(leaks))} of {len(leaks)} | all |"
        rows.append(row)
    return "\n".join(["| | measured | aim |", "| --- | --- | --- |", *rows])


def _found(record: Record) -> Found:
    return Found(record["figures"]["runs"], record["figures"]["steps"])


def _shared(found: Found) -> dict[str, list[dict[str, Any]]]:
    """The runs of each way, of the places in which there is one of every way."""
    places = ("optimizer", "fault", "at", "seed")
    runs = {arm: {tuple(r[key] for key in places): r for r in found.of(arm=arm)} for arm in ARMS}
    common = set.intersection(*(set(of_arm) for of_arm in runs.values()))
    return {arm: [r for place, r in of_arm.items() if place in common] for arm, of_arm in runs.items()}


def _distance(found: Found, runs: list[dict[str, object]]) -> str:
    if all(run.get("stopped") for run in runs):
        return "stopped"
    gaps = [gap for run in runs if (gap := found.distance(run)) is not None]
    return f"{max(gaps):.3f}" if gaps else "-"


# Of each page the tables by their marks, and what each is made of.
MARKS: dict[str, dict[str, tuple[Callable[[Record], str], str]]] = {
    "README.md": {"recovery in short": (recovery_in_short, "recovery")},
    "docs/reference/checkpoints.md": {
        "kill": (bar_rows, "kill"),
        "asynchronous saves": (bar_rows, "async_save"),
    },
    "docs/reference/guard.md": {
        "bars of recovery": (bar_rows, "recovery"),
        "recovery in short": (recovery_in_short, "recovery"),
        "recovery": (recovery, "recovery"),
        "false alarms": (bar_rows, "false_alarms"),
        "false alarms by kind": (false_alarms, "false_alarms"),
        "faults without recomputation": (faults_by_mode, "false_alarms"),
        "guard overhead": (bar_rows, "guard_overhead"),
    },
    "docs/reference/locating.md": {"locate": (bar_rows, "locate")},
    "docs/reference/memory-tests.md": {"growth": (growth, "growth")},
}


def written(page: str) -> str:
    """A page's text with its tables anew."""
    return replaced(
        page, {mark: partial(table, recorded(name)) for mark, (table, name) in MARKS[page].items()}
    )


if __name__ == "__main__":
    for page_name in MARKS:
        (ROOT / page_name).write_text(written(page_name))
