"""Boundary: critical value of the t statistic at each look, for a common error rate of all looks.

The statistics of successive looks at one sample are dependent, so a Bonferroni correction is too strict.
Under the null hypothesis they are a Markov chain of one variable (Jennison & Turnbull, Biometrika 78, 1991):
the cosine u = S / (sqrt(n) R) between the sample and the direction of equal values, with the sum S and the
length R of the sample. It is independent of R. After m more rounds, the cosine

    u' = sqrt(n / n') u sqrt(B) + sqrt(m / n') v sqrt(1 - B),     n' = n + m,

depends only on u, on the beta variable B = R^2 / R'^2, and on v, the cosine of the new rounds. So the
probability that any look exceeds its boundary is a chain of integrals, computed here at fixed nodes. The
shape of Wang & Tsiatis (Biometrics 43, 1987) distributes the error rate among the looks: 0.5 is the same
level at every look (Pocock), 0 leaves nearly all of the rate to the last look (O'Brien & Fleming).
"""

from __future__ import annotations

import math
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import brentq
from scipy.special import betainc, betaln, ndtr, ndtri, stdtrit

from stackwise.support.arguments import check_number, check_sizes, require

__all__ = ["check_looks", "crossing", "quantiles"]

# Number of nodes for the cosine between looks, the beta variable and the cosine of new rounds.
_STATES, _BETA_NODES, _NEW_NODES = 161, 16, 16

Floats = NDArray[np.float64]


def check_looks(looks: tuple[int, ...], key: str = "looks") -> None:
    """Raise ValueError unless the looks are increasing numbers of rounds, from 2.

    Raises:
        ValueError: the looks are not valid.
    """
    require(bool(looks), key, looks, "one or more numbers of rounds")
    for look in looks:
        check_sizes(2, **{key: look})
    require(list(looks) == sorted(set(looks)), key, looks, "numbers that rise")


@lru_cache(maxsize=64)
def quantiles(looks: tuple[int, ...], chance: float, shape: float) -> tuple[float, ...]:
    """Return the boundary of each look: the value that the t statistic has to exceed.

    Args:
        looks: increasing numbers of rounds.
        chance: one-sided probability that any look exceeds its boundary, under the null hypothesis and for
            normal differences.
        shape: distribution of this probability among the looks, from 0 (late looks) over 0.5 (same level at
            every look) to 1 (early looks).

    Raises:
        ValueError: an invalid argument, named in the message.
    """
    check_looks(looks)
    check_number("chance", chance, "a number above 0 and below 0.5", lambda value: 0 < value < 0.5)
    check_number("shape", shape, "a number from 0 to 1", lambda value: 0 <= value <= 1)
    weights = [(look / looks[-1]) ** (shape - 0.5) for look in looks]

    def bounds(scale: float) -> tuple[float, ...]:
        levels = [float(ndtr(-scale * weight)) for weight in weights]
        return tuple(-float(stdtrit(look - 1, p)) for look, p in zip(looks, levels, strict=True))

    if len(looks) == 1:
        return (-float(stdtrit(looks[0] - 1, chance)),)
    # Bracket of the root: the strictest look without a correction, and the least strict look with a
    # Bonferroni correction, with a margin for the error of the nodes.
    low = -0.95 * float(ndtri(chance)) / max(weights)
    high = -1.05 * float(ndtri(chance / len(looks))) / min(weights)
    return bounds(
        brentq(lambda scale: math.log(crossing(looks, bounds(scale)) / chance), low, high, rtol=1e-4)
    )


def crossing(looks: tuple[int, ...], bounds: tuple[float, ...]) -> float:
    """Return the probability that the t statistic of any look exceeds its bound, under the null hypothesis.

    Args:
        looks: increasing numbers of rounds.
        bounds: bound of each look, above 0.
    """
    cosines = [1 / math.hypot(1, math.sqrt(look - 1) / t) for look, t in zip(looks, bounds, strict=True)]
    beyond: Floats = np.zeros(_STATES)
    for place in range(len(looks) - 1, 0, -1):
        beyond = _one_look_back(looks[place - 1], looks[place], cosines[place], beyond)
    first, limit = looks[0], math.asin(cosines[0])
    nodes, weights = _nodes(_STATES, -_reach(first), limit)
    density = weights * _cosine_density(nodes, first)
    return float(_above(np.array(cosines[0]), first) + density @ np.interp(nodes, _angles(first), beyond))


def _reach(rounds: int) -> float:
    """Return the angle that the cosine of this number of rounds exceeds with a probability of only 1e-14."""
    return min(math.pi / 2, 8 / math.sqrt(rounds))


def _angles(rounds: int) -> Floats:
    """Return the states at a look, as angles: their sines are the cosines."""
    return np.linspace(-_reach(rounds), _reach(rounds), _STATES)


def _one_look_back(before: int, after: int, limit: float, beyond: Floats) -> Floats:
    """Return, for each state at a look, the probability that a later look exceeds its bound.

    Args:
        before: number of rounds of the look.
        after: number of rounds of the next look.
        limit: cosine of the bound of the next look.
        beyond: for each state at the next look, the probability that a look after it exceeds its bound.
    """
    more, angles = after - before, _angles(after)
    # sin(psi)^2 is B, which is beta-distributed; psi is nearly normal.
    middle, spread = math.atan(math.sqrt(before / more)), 8 / (2 * math.sqrt(after / 2 + 1))
    psi, weight = _nodes(_BETA_NODES, max(0.0, middle - spread), min(math.pi / 2, middle + spread))
    log_density = (before - 1) * np.log(np.sin(psi)) + (more - 1) * np.log(np.cos(psi))
    weight = weight * 2 * np.exp(log_density - betaln(before / 2, more / 2))
    kept = math.sqrt(before / after) * np.sin(_angles(before))[:, None] * np.sin(psi)  # states x nodes of B
    added = math.sqrt(more / after) * np.cos(psi)
    if more == 1:  # the cosine of one round is -1 or 1
        chance = np.zeros_like(kept)
        for sign in (-1.0, 1.0):
            there = np.clip(kept + sign * added, -1, 1)
            later = np.interp(np.arcsin(there), angles, beyond)
            chance += np.where(there > limit, 1.0, later) / 2
        return np.asarray(chance @ weight)
    turn = np.clip((limit - kept) / added, -1, 1)
    low = -_reach(more)
    high = np.clip(np.arcsin(turn), low, -low)
    unit, share = _nodes(_NEW_NODES, 0.0, 1.0)
    phi = low + (high - low)[..., None] * unit
    density = (high - low)[..., None] * share * _cosine_density(phi, more)
    there = np.clip(kept[..., None] + added[:, None] * np.sin(phi), -1, limit)
    later = np.interp(np.arcsin(there), angles, beyond)
    return np.asarray((_above(turn, more) + (density * later).sum(-1)) @ weight)


def _cosine_density(angle: Floats, rounds: int) -> Floats:
    """Return the density of the angle with the sine u, for the cosine u of this number of normal rounds."""
    return np.asarray(np.exp((rounds - 2) * np.log(np.cos(angle)) - betaln(0.5, (rounds - 1) / 2)))


def _above(cosine: Floats, rounds: int) -> Floats:
    """Return the probability that the cosine of this number of normal rounds exceeds `cosine`."""
    half = (rounds - 1) / 2
    return np.asarray(betainc(half, half, (1 - cosine) / 2))


def _nodes(count: int, low: float, high: float) -> tuple[Floats, Floats]:
    """Return nodes and weights of Gauss-Legendre quadrature from `low` to `high`."""
    nodes, weights = np.polynomial.legendre.leggauss(count)
    return low + (nodes + 1) * (high - low) / 2, weights * (high - low) / 2
