"""Asking: every check of a suite, each on its own, against what was declared to fail."""

from __future__ import annotations

import sysconfig
import traceback
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from stackwise.checks.check import Check, Suite, select_checks
from stackwise.checks.result import CheckResult
from stackwise.spec import ModelSpec
from stackwise.trainer_spec import TrainerSpec

_INSTALLED = {Path(sysconfig.get_path(name)) for name in ("stdlib", "platstdlib", "purelib", "platlib")}

__all__ = ["against_expectation", "broken_off", "check_model", "check_trainer", "refuse_unmatched"]


def check_model(
    model: Any,
    *,
    checks: Iterable[str] | None = None,
    suite: Suite = "fast",
    expected_failures: Mapping[str, str] | None = None,
    device: torch.device | str = "cpu",
    seed: int = 0,
) -> list[CheckResult]:
    """Ask a model every question, and go on where one of them breaks.

    Args:
        model: anything that `ModelSpec.of` understands.
        checks: names of checks or families; None: all of the suite.
        suite: "fast", seconds for a tiny model, or "full".
        expected_failures: check name -> reason. Strict: such a check must fail.
        device: where to run.
        seed: of weights, inputs and dropout.

    Raises:
        ValueError: an unknown check, or an expected failure of a check that is not asked.
    """
    selected = select_checks(checks, suite=suite, asks="model")
    return _ask(ModelSpec.of(model), selected, expected_failures, device, seed)


def check_trainer(
    trainer: Any,
    *,
    checks: Iterable[str] | None = None,
    suite: Suite = "fast",
    expected_failures: Mapping[str, str] | None = None,
    device: torch.device | str = "cpu",
    seed: int = 0,
) -> list[CheckResult]:
    """Ask a training step every question; as `check_model`, of what `TrainerSpec.of` understands."""
    selected = select_checks(checks, suite=suite, asks="trainer")
    return _ask(TrainerSpec.of(trainer), selected, expected_failures, device, seed)


def _ask(
    spec: ModelSpec | TrainerSpec,
    selected: list[Check],
    expected_failures: Mapping[str, str] | None,
    device: torch.device | str,
    seed: int,
) -> list[CheckResult]:
    expected = dict(expected_failures or {})
    refuse_unmatched(expected, [c.name for c in selected])
    results = []
    for one in selected:
        try:
            result = one.run(spec, device=device, seed=seed)
        except Exception as error:
            result = broken_off(one.name, spec.name, error)
        results.append(against_expectation(result, expected.get(one.name)))
    return results


def broken_off(check: str, model: str, error: Exception) -> CheckResult:
    """The result of a check that `error` ended; its place is the last line of the caller's own, if one is."""
    places = traceback.extract_tb(error.__traceback__)
    place = next((place for place in reversed(places) if _is_of_the_caller(place.filename)), places[-1])
    where, meaning = f"{place.filename}:{place.lineno}", f"{type(error).__name__}: {error}"
    return CheckResult(check, model, "error", where=where, meaning=meaning)


def _is_of_the_caller(filename: str) -> bool:
    """Whether it is neither ours nor installed."""
    path, ours = Path(filename), Path(__file__).parents[1]
    installed = (*_INSTALLED, ours, ours.with_name("pytest_stackwise"))
    return path.is_file() and not any(path.is_relative_to(folder) for folder in installed)


def refuse_unmatched(expected: Mapping[str, str], names: Iterable[str]) -> None:
    """Refuse expected failures of checks other than `names`.

    Raises:
        ValueError: naming them.
    """
    names = list(names)
    unmatched = sorted(set(expected) - set(names))
    if unmatched:
        raise ValueError(f"expected_failures: no check {', '.join(unmatched)}; asked: {', '.join(names)}")


def against_expectation(result: CheckResult, reason: str | None) -> CheckResult:
    """The result where a failure was declared with `reason`: a failure is right, all else is not."""
    if reason is None:
        return result
    if result.status == "failed":
        return replace(result, status="expected failure", advice=f"declared: {reason}")
    if result.status == "error":
        return result
    return replace(
        result,
        status="failed",
        meaning=f"declared as an expected failure, but {result.status}. {result.meaning}".strip(),
        advice=f"remove the declaration ({reason})",
    )
