"""pass@k: probability that at least one of k programs for a problem is correct."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from scipy.special import ndtri

from stackwise.support.arguments import check_sizes, require

__all__ = ["PassAtK", "estimate_pass_at_k", "pass_at_k"]


@dataclass(frozen=True)
class PassAtK:
    """pass@k of a set of problems.

    Attributes:
        k: number of programs, of which at least one has to be correct.
        estimate: mean over the problems.
        low: lower end of the interval over problems.
        high: upper end of the interval over problems.
        level: confidence level of the interval, for the mean over problems of this kind.
        n_problems: number of problems. Each has the same weight.
    """

    k: int
    estimate: float
    low: float
    high: float
    level: float
    n_problems: int

    def to_dict(self) -> dict[str, Any]:
        """Return plain values, for JSON."""
        return asdict(self)

    def __str__(self) -> str:
        interval = f"[{self.low:.1%}, {self.high:.1%}]"
        return f"pass@{self.k} {self.estimate:.1%} {interval} of {self.n_problems} problems"


def pass_at_k(n: int, c: int, k: int) -> float:
    """Return the probability that k of n programs include one of the c correct ones, without replacement.

    The value is 1 - C(n - c, k) / C(n, k), which is unbiased for k new programs (Chen et al. 2021,
    arXiv:2107.03374, equation 1). 1 - (1 - c / n)^k is biased.

    Args:
        n: number of programs.
        c: number of correct programs.
        k: number of drawn programs.

    Raises:
        ValueError: fewer programs than k, or more correct programs than programs.
    """
    check_sizes(n=n, k=k)
    check_sizes(0, c=c)
    require(c <= n, "c", c, f"at most n={n}")
    require(k <= n, "k", k, f"at most n={n}, the programs made for the problem")
    # Integers have no rounding error, and are fast enough for a few hundred programs.
    return 1.0 - math.comb(n - c, k) / math.comb(n, k)


def estimate_pass_at_k(
    results: Mapping[str, Sequence[bool]] | Sequence[Sequence[bool]],
    k: int,
    *,
    level: float = 0.95,
) -> PassAtK:
    """Return pass@k of a set of problems, with an interval. Problems may have different numbers of programs.

    The interval is that of Agresti and Coull (The American Statistician 52, 1998, 119-126), with the variance
    between problems instead of the variance of a proportion. It stays wide if there are few problems, or if
    all have the same result. It covers the mean over problems of this kind, with the programs drawn for each.
    If each problem is entirely correct or wrong, as with one program per problem, it is exactly the
    Agresti-Coull interval. Otherwise it is an approximation. From five problems on, an interval of level 0.95
    covers the mean in 90 to 99 of 100 cases. For a single problem, the interval is 0 to 1.

    Args:
        results: for each problem and each of its programs, True if the program is correct.
        k: number of programs, of which at least one has to be correct.
        level: confidence level of the interval.

    Raises:
        ValueError: no problems, or a problem with fewer than k programs.
    """
    if isinstance(results, Mapping):
        problems = dict(results)
    else:
        problems = {str(i): row for i, row in enumerate(results)}
    require(bool(problems), "results", problems, "one problem or more")
    require(0 < level < 1, "level", level, "a number above 0 and below 1")
    check_sizes(k=k)
    short = next((name for name, programs in problems.items() if len(programs) < k), None)
    if short is not None:
        raise ValueError(
            f"results: got {len(problems[short])} programs for problem {short!r}; allowed: at least k={k}"
        )
    rows = problems.values()
    each = np.array([pass_at_k(len(programs), sum(map(bool, programs)), k) for programs in rows])
    low, high = _interval(each, level) if len(each) > 1 else (0.0, 1.0)
    return PassAtK(k, float(each.mean()), low, high, level, len(each))


def _interval(each: np.ndarray, level: float) -> tuple[float, float]:
    """Return Wald's interval of the mean, after z^2 / 2 problems at 0 and as many at 1 were added."""
    z = float(ndtri((1 + level) / 2))
    n, more = len(each) + z**2, z**2 / 2
    mean = (each.sum() + more) / n
    variance = (((each - mean) ** 2).sum() + more * (mean**2 + (1 - mean) ** 2)) / n
    reach = z * math.sqrt(variance / n)
    return max(0.0, float(mean - reach)), min(1.0, float(mean + reach))
