"""Check: one question about a model or a training step, and the registry of all checks.

A family of checks is one file in `model/` or `trainer/`. The decorators `@check` and `@trainer_check` add a
function to the registry, which imports all files of the two folders.
"""

from __future__ import annotations

import importlib
import pkgutil
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from difflib import get_close_matches
from functools import cache, partial
from typing import Any, Literal

import torch

from stackwise.checks.engine.variation import Suite
from stackwise.checks.result import CheckResult, Examined
from stackwise.checks.subject import Subject
from stackwise.checks.trainer_subject import TrainerSubject
from stackwise.subject.spec import ModelSpec
from stackwise.subject.trainer_spec import TrainerSpec
from stackwise.support.arguments import check_choice, require
from stackwise.support.device import threads_for
from stackwise.support.global_settings import kept_settings

__all__ = [
    "OTHER_NAMES",
    "Check",
    "Suite",
    "check",
    "enter",
    "known_checks",
    "refuse_unknown",
    "select_checks",
    "trainer_check",
]

Kind = Literal["model", "trainer"]
# Former names of checks -> present names. Selections and declarations may use both.
OTHER_NAMES = {
    "accumulation_window": "accumulated_gradient",
    "average_follows": "average_share",
    "cache_chunks": "cache_decoding",
    "cache_padding": "padding_amount",
    "causality_far": "long_sequences",
    "checkpoint_round_trip": "interrupted_run",
    "data_resumes": "interrupted_run",
    "evaluation_batches": "evaluation_exact",
    "evaluation_repeats": "evaluation_exact",
    "evaluation_restores": "undisturbed_run",
    "non_finite_gradient": "skipped_step",
    "norm_equals_dense": "gradients_equal_dense",
    "optimizer_coverage": "parameters_change",
    "packing_isolation": "packing_alone",
    "padding_content": "padding_amount",
    "padding_finite": "half_precision",
    "padding_gradients": "padding_empty_row",
    "position_in_epoch": "interrupted_run",
    "resume": "interrupted_run",
    "saving_disturbs_nothing": "undisturbed_run",
    "single_update": "fresh_gradients",
    "small_gradients_pass": "clipped_norm",
}


@dataclass(frozen=True)
class Check:
    """Question about a model or a training step.

    Attributes:
        name: name in test ids, reports and selections.
        family: name of the file that contains it.
        summary: the question, in one line.
        function: examines a Subject or a TrainerSubject.
        asks: kind of the object that it examines, "model" or "trainer".
        suite: "fast" for both suites, "full" for this one only.
    """

    name: str
    family: str
    summary: str
    function: Callable[[Any], CheckResult]
    asks: Kind = "model"
    suite: Suite = "fast"

    def run(
        self, spec: ModelSpec | TrainerSpec, *, device: torch.device | str = "cpu", seed: int = 0
    ) -> CheckResult:
        """Run the check. Tiny models run on one thread.

        Raises:
            Exception: any exception of the subject or of the check, unchanged.
        """
        kind: type[Examined] = TrainerSubject if isinstance(spec, TrainerSpec) else Subject
        subject = kind(spec, torch.device(device), seed)
        start = time.perf_counter()
        with threads_for(spec.n_parameters), kept_settings():
            result = self.function(subject)
        seconds = time.perf_counter() - start if result.seconds is None else result.seconds
        return replace(result, check=self.name, seconds=round(seconds, 3))


_registry: dict[str, Check] = {}


def check(question: Any = None, *, asks: Kind = "model", suite: Suite = "fast") -> Callable[..., Any]:
    """Add a question about a model to the registry, under the name of the function.

    The first line of its docstring is the question. Slow checks use `@check(suite="full")`.
    """

    def decorate(function: Callable[[Any], CheckResult]) -> Callable[[Any], CheckResult]:
        assert function.__doc__, function
        family = function.__module__.rpartition(".")[2]
        summary = function.__doc__.strip().splitlines()[0]
        enter(Check(function.__name__, family, summary, function, asks, suite))
        return function

    return decorate if question is None else decorate(question)


# Add a question about a training step to the registry.
trainer_check = partial(check, asks="trainer")


def enter(check: Check) -> None:
    """Add a check to the registry."""
    assert check.name not in _registry, check.name
    _registry[check.name] = check


@cache
def known_checks() -> Mapping[str, Check]:
    """Return every check by name. Determinism is first: if it fails, comparisons are not reliable."""
    from stackwise.checks import model, trainer

    for package in (model, trainer):
        for module in pkgutil.iter_modules(package.__path__, package.__name__ + "."):
            importlib.import_module(module.name)
    return dict(sorted(_registry.items(), key=lambda item: (item[1].family != "determinism", item[0])))


def refuse_unknown(names: Iterable[str], *, asks: Kind | None = None) -> None:
    """Raise if a name is neither a check nor a family.

    Args:
        names: names of checks or families.
        asks: kind of the object that the checks examine. None: both kinds.

    Raises:
        ValueError: an unknown name, or no name.
    """
    wanted = set(names)
    require(bool(wanted), "checks", [], "names of checks or families, or None for all")
    checks = {one.name: one.family for one in known_checks().values() if asks in (None, one.asks)}
    known = {*checks, *checks.values()} | {old for old, new in OTHER_NAMES.items() if new in checks}
    every_kind = {name for one in known_checks().values() for name in (one.name, one.family)}
    unknown = sorted(wanted - known - every_kind - OTHER_NAMES.keys())
    of_other_kind = sorted(wanted - known - set(unknown))
    problems = [f"unknown {', '.join(unknown)}"] if unknown else []
    if of_other_kind:
        other = "training steps" if asks == "model" else "models"
        problems.append(f"{', '.join(of_other_kind)}: for {other} only")
    if not problems:
        return
    matches = {name: get_close_matches(name, known - OTHER_NAMES.keys(), n=2) for name in unknown}
    near = dict.fromkeys(match for found in matches.values() for match in found)
    hint = f"; did you mean {' or '.join(near)}?" if near else ""
    families = ", ".join(dict.fromkeys(checks.values()))
    every = "" if matches and all(matches.values()) else f"; checks: {', '.join(checks)}"
    raise ValueError(f"checks: {'; '.join(problems)}{hint}; families: {families}{every}")


def select_checks(
    names: Iterable[str] | None = None, *, suite: Suite = "fast", asks: Kind = "model"
) -> list[Check]:
    """Return the checks of a suite, in registry order.

    Args:
        names: names of checks or families; None: all. A named check need not belong to the suite.
        suite: "fast" (seconds) or "full" (all).
        asks: kind of the object that they examine.

    Raises:
        ValueError: an unknown name or suite.
    """
    check_choice("suite", suite, ("fast", "full"))
    known = {name: c for name, c in known_checks().items() if c.asks == asks}
    in_suite = [c for c in known.values() if suite == "full" or c.suite == "fast"]
    if names is None:
        return in_suite
    wanted = set(names)
    refuse_unknown(wanted, asks=asks)
    wanted = {OTHER_NAMES.get(name, name) for name in wanted}
    return [c for c in known.values() if c.name in wanted or (c.family in wanted and c in in_suite)]
