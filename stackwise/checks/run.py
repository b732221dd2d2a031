"""Run the checks of a suite, and compare the results with the findings that the user declared."""

from __future__ import annotations

import sysconfig
import traceback
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from stackwise.checks.check import OTHER_NAMES, Check, Suite, select_checks
from stackwise.checks.output import shown_once
from stackwise.checks.result import CheckResult, Status
from stackwise.checks.subject import forget_results
from stackwise.subject.spec import ModelSpec
from stackwise.subject.trainer_spec import TrainerSpec
from stackwise.support.system_errors import reraise_unless_failure

_INSTALLED = {Path(sysconfig.get_path(name)) for name in ("stdlib", "platstdlib", "purelib", "platlib")}

OnProgress = Callable[[int, int, str], object]

__all__ = ["Declared", "broken_off", "check_model", "check_trainer"]


def check_model(
    model: Any,
    *,
    checks: Iterable[str] | None = None,
    suite: Suite = "fast",
    expected_failures: Mapping[str, str] | None = None,
    accepted_warnings: Mapping[str, str] | None = None,
    strict: bool = False,
    device: torch.device | str = "cpu",
    seed: int = 0,
    on_progress: OnProgress | None = None,
) -> list[CheckResult]:
    """Run every check of a suite on a model, and continue after one that raises.

    A line that the model or a library prints is shown once, however often the model is built.

    Args:
        model: anything that `ModelSpec.of` understands.
        checks: names of checks or families; None: all of the suite.
        suite: "fast", seconds for a tiny model, or "full".
        expected_failures: check name -> reason. Such a check must fail.
        accepted_warnings: check name -> reason. Such a check must warn.
        strict: a warning that is not accepted fails.
        device: where the model runs.
        seed: seed of weights, inputs and dropout.
        on_progress: called before each check with the number of finished checks, the number of all checks
            and the name of the check.

    Raises:
        ValueError: an unknown check, or a declaration for a check that is not selected.
    """
    selected = select_checks(checks, suite=suite, asks="model")
    declared = Declared(expected_failures or {}, accepted_warnings or {}, strict)
    with shown_once():
        return _run(ModelSpec.of(model), selected, declared, device, seed, on_progress)


def check_trainer(
    trainer: Any,
    *,
    checks: Iterable[str] | None = None,
    suite: Suite = "fast",
    expected_failures: Mapping[str, str] | None = None,
    accepted_warnings: Mapping[str, str] | None = None,
    strict: bool = False,
    device: torch.device | str = "cpu",
    seed: int = 0,
    on_progress: OnProgress | None = None,
) -> list[CheckResult]:
    """Run checks on a training loop: anything that `TrainerSpec.of` understands.

    Arguments and errors are those of `check_model`.
    """
    selected = select_checks(checks, suite=suite, asks="trainer")
    declared = Declared(expected_failures or {}, accepted_warnings or {}, strict)
    with shown_once():
        return _run(TrainerSpec.of(trainer), selected, declared, device, seed, on_progress)


def _run(
    spec: ModelSpec | TrainerSpec,
    selected: list[Check],
    declared: Declared,
    device: torch.device | str,
    seed: int,
    on_progress: OnProgress | None,
) -> list[CheckResult]:
    declared.refuse_unmatched([c.name for c in selected])
    results = []
    try:
        for number, one in enumerate(selected):
            if on_progress is not None:
                on_progress(number, len(selected), one.name)
            with shown_once() as shown:
                shown.next_round()
                try:
                    result = one.run(spec, device=device, seed=seed)
                except BaseException as error:
                    reraise_unless_failure(error)
                    result = broken_off(one.name, spec.name, error)
            results.append(declared.apply(result))
    finally:
        forget_results()
    return results


@dataclass(frozen=True)
class Declared:
    """The findings that a user knows of, and the treatment of warnings.

    Attributes:
        expected_failures: check name -> reason. Such a check must fail.
        accepted_warnings: check name -> reason. Such a check must warn.
        strict: a warning that is not accepted fails.
    """

    expected_failures: Mapping[str, str] = field(default_factory=dict)
    accepted_warnings: Mapping[str, str] = field(default_factory=dict)
    strict: bool = False

    def __post_init__(self) -> None:
        for name in ("expected_failures", "accepted_warnings"):
            reasons = {OTHER_NAMES.get(check, check): why for check, why in getattr(self, name).items()}
            object.__setattr__(self, name, reasons)

    def refuse_unmatched(self, names: Iterable[str]) -> None:
        """Raise if a declaration is for a check other than `names`, or if a check has two.

        Raises:
            ValueError: naming the checks, and the names that are allowed.
        """
        names = list(names)
        both = {"expected_failures": self.expected_failures, "accepted_warnings": self.accepted_warnings}
        for argument, reasons in both.items():
            for check, reason in reasons.items():
                if not (isinstance(reason, str) and reason.strip()):
                    raise ValueError(f"{argument}[{check!r}]: got {reason!r}; allowed: a reason, a text")
            if unmatched := sorted(set(reasons) - set(names)):
                raise ValueError(
                    f"{argument}: got {', '.join(unmatched)}, which this run does not select; "
                    f"allowed: {', '.join(names)}"
                )
        if twice := sorted(set(self.expected_failures) & set(self.accepted_warnings)):
            raise ValueError(
                f"accepted_warnings: got {', '.join(twice)}, also in expected_failures; allowed: one of them"
            )

    def apply(self, result: CheckResult) -> CheckResult:
        """Return the result with the status that the declarations give it.

        A declared finding that occurred is "expected failure" or "accepted warning". If it did not occur,
        the check fails, because the declaration is out of date. Errors stay errors.
        """
        if (reason := self.expected_failures.get(result.check)) is not None:
            return _declared(result, "failed", "expected failure", reason)
        if (reason := self.accepted_warnings.get(result.check)) is not None:
            return _declared(result, "warned", "accepted warning", reason)
        if self.strict and result.status == "warned":
            text = "Strict: a warning fails unless accepted_warnings declares it."
            return replace(result, status="failed", advice=f"{result.advice} {text}".strip())
        return result


def _declared(result: CheckResult, finding: Status, status: Status, reason: str) -> CheckResult:
    """Return the result of a check for which the status `finding` was declared."""
    if result.status == finding:
        return replace(result, status=status, advice=f"declared: {reason}")
    # A failure is more than an accepted warning: it is reported as it is.
    if result.status in ("error", "failed"):
        return result
    other = ", and declare it in accepted_warnings" if result.status == "warned" else ""
    return replace(
        result,
        status="failed",
        meaning=f"declared as an {status}, but {result.status}. {result.meaning}".strip(),
        advice=f"remove the declaration ({reason}){other}",
    )


def broken_off(check: str, model: str, error: BaseException) -> CheckResult:
    """Return the result of a check that raised `error`, located at the last line of the user's own code."""
    places = traceback.extract_tb(error.__traceback__)
    place = next((place for place in reversed(places) if _is_user_code(place.filename)), places[-1])
    where, meaning = f"{place.filename}:{place.lineno}", f"{type(error).__name__}: {error}"
    return CheckResult(check, model, "error", where=where, meaning=meaning)


def _is_user_code(filename: str) -> bool:
    """Return True for a file that belongs neither to stackwise nor to an installed package."""
    path, ours = Path(filename), Path(__file__).parents[1]
    installed = (*_INSTALLED, ours, ours.with_name("pytest_stackwise"))
    return path.is_file() and not any(path.is_relative_to(folder) for folder in installed)
