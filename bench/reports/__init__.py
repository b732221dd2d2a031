"""Reports: public bug reports, each rebuilt as a small model or training loop with and without the bug.

The reports were collected after the checks were frozen, by authors who did not know the checks. The mistake
is in the code of a model, its loss or its training loop, and raises no exception. The first report of each
class of mistake was taken. The 30 reports of the first sample were asked at c1b02b3. The 20 of the second
sample have no class of the first one, and were asked at 81577e3. `first_result.json` and `second_result.json`
are the results of the frozen checks. Do not overwrite them. The 20 reports of training loops were asked at
8eb0f3f, in the full suite, because the fast suite starts no processes. Their first result is
`loops_result.json`. Ten further reports of training loops were asked at 3594445: `more_loops_result.json`.
The 20 reports of the third sample of models, of classes that the first two do not have, were asked at
db511b5: `third_result.json`. Three of these cases were corrected after that, because their healthy form was
wrong itself: big_vision_115, sasrec_47 and u_dit_12. The 20 reports of the fourth sample were asked at
048878b: `fourth_result.json`. Those of the fifth sample were asked at 7c11233: `fifth_result.json`. The
third sample of 15 training loops was asked at f308a2d: `third_loops_result.json`. The 20 reports of the sixth
sample of models were asked at 18acfcc: `sixth_result.json`. Those of the seventh sample were asked at
85fe6bd: `seventh_result.json`. Those of the eighth sample were asked at 18ebf02: `eighth_result.json`. Its
authors left out all classes of the other samples. The 30 reports of the ninth sample and the
nine of the fourth sample of training loops were asked at 95b97bf: `ninth_result.json` and
`fourth_loops_result.json`. Their authors took reports of any class, as searches of issue trackers gave them.
The searches were for bugs without an exception, and half of those for models for features that interact.
One author saw the inferred window of mlx_lm_843 before the first run, and moved an attribute. vllm_13474 and
vllm_40095 declare the healthy form as reference.
The 26 reports of the tenth sample of models were asked at ff39ba77: `tenth_result.json`. One author searched
for language models of all kinds, the other one for vision, audio, diffusion, time series, biology and
recommendation, both for bugs of any class, in the order of the search. nanotron_427, profam_167 and
vllm_34186 declare a correct computation as reference. The finding about dcdetector_10 is an accident: the
difference between autocast and float64 was 1.005 times its limit.

A module in `cases/` has `buggy()`, `healthy()`, and `observe(model)`, which shows the bug without any check.
`declared(make)` returns a ModelSpec of one of them with facts that a user would state. Forms with different
facts are `buggy_declared()` and `healthy_declared()`. The declared forms were written after the freeze, those
of the later samples before their first run. Eight cases of the first two samples got theirs when the fact in
their DECLARATION could be declared. A module in `loops/` has `prove()` instead of `observe(model)`, and its
declared forms, which return a TrainerSpec, were written before the first run.
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
from stackwise.subject.spec import ModelSpec
from stackwise.subject.trainer_spec import TrainerSpec

__all__ = [
    "SAMPLES",
    "first_results",
    "forms",
    "found",
    "measure_reports",
    "modules",
    "report_bars",
    "report_names",
]

FOLDER = Path(__file__).parent
# Name in the bars -> results of the frozen checks.
SAMPLES = {
    "fresh reports": FOLDER / "first_result.json",
    "fresh reports of other classes": FOLDER / "second_result.json",
    "fresh reports of training loops": FOLDER / "loops_result.json",
    "further reports of training loops": FOLDER / "more_loops_result.json",
    "third sample of training loops": FOLDER / "third_loops_result.json",
    "further reports of models": FOLDER / "third_result.json",
    "fourth sample of models": FOLDER / "fourth_result.json",
    "fifth sample of models": FOLDER / "fifth_result.json",
    "sixth sample of models": FOLDER / "sixth_result.json",
    "seventh sample of models": FOLDER / "seventh_result.json",
    "eighth sample of models": FOLDER / "eighth_result.json",
    "ninth sample of models": FOLDER / "ninth_result.json",
    "fourth sample of training loops": FOLDER / "fourth_loops_result.json",
    "tenth sample of models": FOLDER / "tenth_result.json",
}
_FORMS = ("buggy", "healthy", "buggy_declared", "healthy_declared")
_SECONDS = 300.0


def modules() -> dict[str, ModuleType]:
    """Return the module of each report, by name, those of models first."""
    return {
        path.stem: importlib.import_module(f"bench.reports.{folder}.{path.stem}")
        for folder in ("cases", "loops")
        for path in sorted((FOLDER / folder).glob("*.py"))
    }


def first_results() -> dict[str, Any]:
    """Return the results of the frozen checks on each form of each report."""
    results: dict[str, Any] = {}
    for path in SAMPLES.values():
        results |= json.loads(path.read_text())
    return results


def measure_reports(claim: Claim, jobs: int, answers: Callable[..., Iterator[dict[str, Any]]]) -> None:
    """Run `answers` on each form of each report: the fast suite of a model, the full suite of a loop."""
    figures = claim.figures.setdefault("reports", {})
    chosen = list(modules().items())[: 2 if claim.quick else None]
    asked = {
        f"{name}:{form}": functools.partial(
            answers, functools.partial(_made, module, form), suite="full" if _is_loop(module) else "fast"
        )
        for name, module in chosen
        for form in forms(module)
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


def forms(module: ModuleType) -> dict[str, Callable[[], Any]]:
    """Return the factory of each form of a report, such as "buggy" and "healthy_declared"."""
    found = {form: getattr(module, form) for form in _FORMS if hasattr(module, form)}
    if hasattr(module, "declared"):
        plain = {form: found[form] for form in ("buggy", "healthy")}
        found |= {
            f"{form}_declared": functools.partial(module.declared, make) for form, make in plain.items()
        }
    return found


def _is_loop(module: ModuleType) -> bool:
    return hasattr(module, "prove")


def _made(module: ModuleType, form: str) -> Any:
    make = forms(module)[form]
    # A training loop is set up again by each check; its specs are made as they are.
    made = make() if form.endswith("declared") or _is_loop(module) else make
    return made if isinstance(made, ModelSpec | TrainerSpec) or not _is_loop(module) else TrainerSpec.of(make)


def found(figures: Mapping[str, Any], status: str, name: str) -> bool:
    """Return True if a check has this status on a buggy form of a report, and not on the healthy form."""
    for declared in ("", "_declared"):
        buggy, healthy = (figures.get(f"{name}:{form}{declared}", {}) for form in ("buggy", "healthy"))
        ran = bool(healthy) and healthy["exception"] is None
        if ran and set(buggy.get(status, ())) - set(healthy.get(status, ())):
            return True
    return False


def report_names(figures: Mapping[str, Any]) -> list[str]:
    """Return the names of the reports in figures of their forms."""
    return sorted({name.partition(":")[0] for name in figures})


def report_bars(figures: Mapping[str, Any]) -> list[Bar]:
    """Return the shares of the reports of each sample that were found at first sight, and are found now."""
    bars = []
    for sample, path in SAMPLES.items() if figures else ():
        first = json.loads(path.read_text())
        names = [name for name in report_names(first) if f"{name}:buggy" in figures]
        for when, some, limit in (("at first sight", first, 0.60), ("now", figures, 0.90)):
            share = sum(found(some, "failed", name) for name in names) / max(len(names), 1)
            bars.append(Bar(f"{sample} found {when}", share, limit, full_size=True))
    return bars
