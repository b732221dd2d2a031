"""Applicable: the end of a check as "not applicable", from any function that it calls."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar

from stackwise.checks import check
from stackwise.checks.engine.variation import Suite
from stackwise.checks.result import CheckResult, Examined

__all__ = ["UnmeasuredError", "needed", "not_applicable_if_unmeasured", "trainer_check"]

T = TypeVar("T")
S = TypeVar("S", bound=Examined)


class UnmeasuredError(Exception):
    """Error of a measurement that is not possible. The argument is the reason."""


def needed(value: T | None, need: str) -> T:
    """Return a value without which a check does not apply.

    Raises:
        UnmeasuredError: the value is None, False, or an empty collection.
    """
    if value is None or value is False or (isinstance(value, list | tuple | dict | set | str) and not value):
        raise UnmeasuredError(f"needs {need}")
    return value


def not_applicable_if_unmeasured(function: Callable[[S], CheckResult]) -> Callable[[S], CheckResult]:
    """Return a check that does not apply if the function raises UnmeasuredError."""

    @wraps(function)
    def examine(subject: S) -> CheckResult:
        try:
            return function(subject)
        except UnmeasuredError as error:
            return subject.not_applicable(str(error))

    return examine


def trainer_check(question: Any = None, *, suite: Suite = "fast") -> Callable[..., Any]:
    """Add a question about a training step to the registry. `needed` may end it."""

    def decorate(function: Callable[..., CheckResult]) -> Any:
        return check.trainer_check(suite=suite)(not_applicable_if_unmeasured(function))

    return decorate if question is None else decorate(question)
