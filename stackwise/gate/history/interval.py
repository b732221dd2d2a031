"""Interval: verdict on a difference with a known standard error, from a single look."""

from __future__ import annotations

import math

from scipy.special import stdtrit

from stackwise.gate.sequential import Rule
from stackwise.gate.verdict import Decision, Verdict

__all__ = ["ONE_LOOK", "decide"]

# Error rates of a single look. The looks of this rule are not used.
ONE_LOOK = Rule(alpha=0.01, miss=0.01, confirm=0.05, run_alpha=0.01)


def decide(
    difference: float,
    error: float,
    freedom: float,
    tolerance: float,
    minimum_effect: float,
    *,
    alpha: float,
    miss: float,
    rounds: int,
    doubt: str,
    source: str,
) -> Decision:
    """Return a decision by the criteria of the gate: see `stackwise.gate.sequential.Rule.look`.

    Args:
        difference: log(head / base).
        error: standard error of the difference; 0 for exact values.
        freedom: degrees of freedom of the standard error.
        tolerance: logarithm of the tolerance.
        minimum_effect: logarithm of the minimum effect.
        alpha: probability that an unchanged cost is found slower; the same for faster.
        miss: probability that a change as large as the tolerance passes.
        rounds: number of rounds, for the Decision.
        doubt: reason for an INCONCLUSIVE verdict, as half a sentence.
        source: source of the interval, as half a sentence.
    """
    flag, above = (-float(stdtrit(freedom, chance)) * error for chance in (alpha, miss))
    if difference + flag < 0 and difference < -minimum_effect:
        verdict, reason = Verdict.IMPROVED, "the whole interval is below 0"
    elif difference + above < tolerance:
        verdict, reason = Verdict.PASS, "the whole interval is below the tolerance"
    elif difference - flag > 0 and difference > minimum_effect:
        verdict, reason = Verdict.REGRESSED, "the whole interval is above 0"
    else:
        verdict, reason = Verdict.INCONCLUSIVE, doubt
    above = flag if verdict is Verdict.IMPROVED else above
    return Decision(
        verdict,
        math.expm1(difference),
        math.expm1(difference - flag),
        math.expm1(difference + above),
        level=1 - alpha - (alpha if verdict is Verdict.IMPROVED else miss),
        rounds=rounds,
        confirmed=False,
        reason=f"{reason}; {source}",
    )
