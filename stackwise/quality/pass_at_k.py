"""pass@k: the chance that one of k programs for a problem is right."""

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
        k: programs of which one has to be right.
        estimate: mean over the problems.
        low: lower end of the interval, over problems.
        high: upper end.
        level: that the interval covers the mean over problems of this kind.
        n_problems: of which each counts the same.
    """

    k: int
    estimate: float
    low: float
    high: float
    level: float
    n_problems: int

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return asdict(self)

    def __str__(self) -> str:
        interval = f"[{self.low:.1%}, {self.high:.1%}]"
        return f"pass@{self.k} {self.estimate:.1%} {interval} of {self.n_problems} problems"


def pass_at_k(n: int, c: int, k: int) -> float:
    """Of a problem: the chance that among k of n programs, drawn without putting back, one of the c right is.

    1 - C(n - c, k) / C(n, k), which is unbiased for k fresh programs (Chen et al. 2021, arXiv:2107.03374,
    equation 1). 1 - (1 - c / n)^k is not.

    Args:
        n: programs that were made.
        c: that are right.
        k: that are drawn.

    Raises:
        ValueError: fewer programs than k, or more right ones than programs.
    """
    check_sizes(n=n, k=k)
    check_sizes(0, c=c)
    require(c <= n, "c", c, f"at most n={n}")
    require(k <= n, "k", k, f"at most n={n}, the programs made for the problem")
    # Whole numbers have no rounding, and the binomials of a few hundred programs are long but exact.
    return 1.0 - math.comb(n - c, k) / math.comb(n, k)


def estimate_pass_at_k(
    results: Mapping[str, Sequence[bool]] | Sequence[Sequence[bool]],
    k: int,
    *,
    level: float = 0.95,
) -> PassAtK:
    """pass@k of a set of problems, each by its own number of programs, with an interval.

    The interval is that of Agresti and Coull (The American Statistician 52, 1998, 119-126), with the variance
    between problems in place of a proportion's: few problems, or such that all came out alike, leave it wide.
    What it covers is the mean over problems of this kind, with the programs of each as they were drawn. Where
    each problem is right or wrong, as with one program of each, it is exactly theirs; at other shares it is
    an approximation. From five problems on, one of level 0.95 covers that mean in 90 to 99 of 100 cases. A
    single problem says nothing of others: 0 to 1.

    Args:
        results: of each problem, of each program whether it is right.
        k: programs of which one has to be right.
        level: of the interval.

    Raises:
        ValueError: no problem, or one with fewer than k programs.
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
    """Of the mean of shares: Wald's interval, after half of z^2 problems more at 0 and as many at 1."""
    z = float(ndtri((1 + level) / 2))
    n, more = len(each) + z**2, z**2 / 2
    mean = (each.sum() + more) / n
    variance = (((each - mean) ** 2).sum() + more * (mean**2 + (1 - mean) ** 2)) / n
    reach = z * math.sqrt(variance / n)
    return max(0.0, float(mean - reach)), min(1.0, float(mean + reach))
