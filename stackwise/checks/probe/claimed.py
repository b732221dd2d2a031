"""Claimed: checks that compare measured constants of a model with those of ModelSpec.facts."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any

from stackwise.checks.check import check
from stackwise.checks.probe.applicable import UnmeasuredError, needed, not_applicable_if_unmeasured
from stackwise.checks.result import CheckResult
from stackwise.checks.subject import Subject

__all__ = ["UnmeasuredError", "claimed", "each"]

# Measured value and claimed value of one place. A measured value of None: it cannot be measured.
Pair = tuple[Any, Any]


def claimed(
    name: str, *, place: str, advice: str, reason: str, limit: float = 1e-3
) -> Callable[[Callable[[Subject, Any], Sequence[Pair]]], Callable[[Subject], CheckResult]]:
    """Return a decorator that makes a check of `claimed_<fact>`, a function from a claim to measured pairs.

    Args:
        name: noun phrase for the value.
        place: noun for a place, such as "attention".
        advice: likely causes of a wrong value.
        reason: property of the places that can be measured.
        limit: largest relative difference.
    """

    def decorate(measure: Callable[[Subject, Any], Sequence[Pair]]) -> Callable[[Subject], CheckResult]:
        fact = measure.__name__.removeprefix("claimed_")

        @not_applicable_if_unmeasured
        @wraps(measure)
        def compare(subject: Subject) -> CheckResult:
            text = f"{fact} in ModelSpec.facts, or a configuration with it"
            pairs = measure(subject, needed(getattr(subject.spec.facts, fact), text))
            seen = [(i, *pair) for i, pair in enumerate(pairs) if pair[0] is not None]
            gaps = [(_gap(value, wanted), i, value, wanted) for i, value, wanted in seen]
            gap, i, value, wanted = needed(max(gaps, default=None), reason)
            if gap > limit:
                return subject.failed(
                    gap,
                    limit,
                    where=f"{place} {i + 1} of {len(pairs)}",
                    meaning=f"The {name} is {_text(value)}, but {_text(wanted)} is claimed.",
                    advice=advice,
                )
            return subject.passed(gap, limit, meaning=f"{len(seen)} of {len(pairs)} places were measured.")

        return check(compare)

    return decorate


def each(claim: Any, n: int) -> tuple[Any, ...]:
    """Return the claim of each of n places.

    Raises:
        UnmeasuredError: the claim has another number of values.
    """
    claims = claim if isinstance(claim, tuple) else (claim,) * n
    needed(len(claims) == n, f"one place for each claimed value: {len(claims)} claimed, {n} seen")
    return claims


def _gap(value: Any, claim: Any) -> float:
    """Return the relative difference, for tuples the largest one. Unequal integers differ by inf."""
    if isinstance(claim, tuple):
        pairs = list(zip(value, claim, strict=False))
        return max(map(_gap, *zip(*pairs, strict=True))) if len(value) == len(claim) else math.inf
    if value == claim:
        return 0.0
    return abs(value / claim - 1) if claim and isinstance(value, float) else math.inf


def _text(value: Any) -> str:
    if isinstance(value, tuple):
        return f"({', '.join(map(_text, value))})"
    return f"{value:.6g}" if isinstance(value, float) else str(value)
