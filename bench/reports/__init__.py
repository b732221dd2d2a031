"""Reports: public bug reports, each rebuilt as a small model with and without the bug.

The reports were collected after the checks were frozen at c1b02b3, by authors who did not know the checks.
The mistake is in the code of a model or its loss and raises no exception. The first report of each class of
mistake was taken. `first_result.json` is the result of the frozen checks. Do not overwrite it.

A module in `cases/` has `buggy()`, `healthy()`, and `observe(model)`, which shows the bug without any check.
`buggy_declared()` and `healthy_declared()` return a ModelSpec with a fact that a user would state. They were
written after the freeze.
"""

from __future__ import annotations

import functools
import importlib
import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

from bench.claim import Bar, Claim
from bench.isolated import all_isolated

__all__ = ["FIRST_RESULT", "found", "measure_reports", "modules", "report_bars"]

FOLDER = Path(__file__).parent
FIRST_RESULT = FOLDER / "first_result.json"
_FORMS = ("buggy", "healthy", "buggy_declared", "healthy_declared")
_SECONDS = 300.0


def modules() -> dict[str, ModuleType]:
    """Return the module of each report, by name."""
    names = sorted(path.stem for path in (FOLDER / "cases").glob("*.py"))
    return {name: importlib.import_module(f"bench.reports.cases.{name}") for name in names}


def measure_reports(
    claim: Claim, jobs: int, answers: Callable[[Callable[[], Any]], Iterator[dict[str, Any]]]
) -> None:
    """Run `answers`, the fast suite, on each form of each report."""
    figures = claim.figures.setdefault("reports", {})
    chosen = list(modules().items())[: 2 if claim.quick else None]
    asked = {
        f"{name}:{form}": functools.partial(answers, functools.partial(_made, name, form))
        for name, module in chosen
        for form in _FORMS
        if hasattr(module, form)
    }
    new = {name: run for name, run in asked.items() if name not in figures}
    for name, ended in all_isolated(new, jobs=jobs, seconds=_SECONDS):
        results = ended.values[1:]
        figures[name] = {
            status: {each["check"]: each.get("meaning", "") for each in results if each["status"] == status}
            for status in ("failed", "warned", "error")
        } | {"exception": ended.error}
        claim.write()
        print(f"report {name}: {figures[name]}", flush=True)


def _made(name: str, form: str) -> Any:
    make = getattr(importlib.import_module(f"bench.reports.cases.{name}"), form)
    return make() if form.endswith("declared") else make


def found(figures: Mapping[str, Any], status: str, name: str) -> bool:
    """Return True if a check has this status on a buggy form of a report, and not on the healthy form."""
    for declared in ("", "_declared"):
        buggy, healthy = (figures.get(f"{name}:{form}{declared}", {}) for form in ("buggy", "healthy"))
        ran = bool(healthy) and healthy["exception"] is None
        if ran and set(buggy.get(status, ())) - set(healthy.get(status, ())):
            return True
    return False


def report_bars(figures: Mapping[str, Any]) -> list[Bar]:
    """Return the share of the reports that were found at first sight, and that are found now."""
    if not figures:
        return []
    names = sorted({name.partition(":")[0] for name in figures})
    shares = [
        sum(found(some, "failed", name) for name in names) / len(names)
        for some in (json.loads(FIRST_RESULT.read_text()), figures)
    ]
    return [
        Bar("fresh reports found at first sight", shares[0], 0.60, full_size=True),
        Bar("fresh reports found now", shares[1], 0.90, full_size=True),
    ]
