"""Interval: a verdict over a difference whose error is known by Student's t, without rounds to look again."""

from __future__ import annotations

import math

from scipy.special import stdtrit

from stackwise.gate.sequential import Rule
from stackwise.gate.verdict import Decision, Verdict

__all__ = ["ONE_LOOK", "decide"]

# The chances of error where a difference is looked at once; the looks themselves are not used.
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
    """A verdict by the rules of the gate: see `stackwise.gate.sequential.Rule.look`.

    Args:
        difference: log(head / base).
        error: its standard error; 0 for what is always the same.
        freedom: degrees of freedom of the error.
        tolerance: as a logarithm.
        minimum_effect: as a logarithm.
        alpha: the chance that what has not changed is found slower; the same for faster.
        miss: the chance that a change as large as the tolerance passes.
        rounds: for the Decision.
        doubt: why nothing can be told where nothing can, as half a sentence.
        source: what the interval was made of, as half a sentence.
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
