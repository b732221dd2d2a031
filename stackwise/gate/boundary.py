"""Boundary: how large a t statistic must be at each look, so that all together err with a given chance.

The statistics of successive looks at one sample are dependent, and adding up their chances of error
(Bonferroni) asks for too much. Under no change they are a Markov chain of one variable (Jennison & Turnbull,
Biometrika 78, 1991): the cosine u = S / (sqrt(n) R) between the sample and the direction of equal values,
where S is its sum and R its length, is independent of R. What m more rounds make of it,

    u' = sqrt(n / n') u sqrt(B) + sqrt(m / n') v sqrt(1 - B),     n' = n + m,

needs only B = R^2 / R'^2, a beta variable, and v, the cosine of the new rounds by themselves. So the chance
that any look is beyond its boundary is a chain of integrals, computed here on fixed nodes. How the chance is
shared out between the looks follows Wang & Tsiatis (Biometrics 43, 1987): a shape of 0.5 gives every look the
same level (Pocock), 0 leaves nearly all to the last (O'Brien & Fleming).
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

# Nodes of the cosine between looks, of the beta variable and of the cosine of new rounds.
_STATES, _BETA_NODES, _NEW_NODES = 161, 16, 16

Floats = NDArray[np.float64]


def check_looks(looks: tuple[int, ...], key: str = "looks") -> None:
    """Refuse looks that are not numbers of rounds, from 2, which rise.

    Raises:
        ValueError: naming them.
    """
    require(bool(looks), key, looks, "one or more numbers of rounds")
    for look in looks:
        check_sizes(2, **{key: look})
    require(list(looks) == sorted(set(looks)), key, looks, "numbers that rise")


@lru_cache(maxsize=64)
def quantiles(looks: tuple[int, ...], chance: float, shape: float) -> tuple[float, ...]:
    """The boundary of each look: what the t statistic of so many rounds has to exceed.

    Args:
        looks: numbers of rounds, rising.
        chance: that any of them is beyond its boundary, on one side, where nothing has changed and
            differences are normal.
        shape: from 0 (late looks get the chance) to 0.5 (all the same) and beyond (early ones do).

    Raises:
        ValueError: naming the argument.
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
    # Between no correction at the look that gets the most, and one for as many looks as there are at the one
    # that gets the least, and a little on either side for what the nodes leave out.
    low = -0.95 * float(ndtri(chance)) / max(weights)
    high = -1.05 * float(ndtri(chance / len(looks))) / min(weights)
    return bounds(
        brentq(lambda scale: math.log(crossing(looks, bounds(scale)) / chance), low, high, rtol=1e-4)
    )


def crossing(looks: tuple[int, ...], bounds: tuple[float, ...]) -> float:
    """The chance that the t statistic of any look exceeds its bound, where nothing has changed.

    Args:
        looks: numbers of rounds, rising.
        bounds: of each, above 0.
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
    """The angle beyond which the cosine of so many rounds does not get, but for a chance of 1e-14."""
    return min(math.pi / 2, 8 / math.sqrt(rounds))


def _angles(rounds: int) -> Floats:
    """The states at a look, as the angles whose sines are the cosines."""
    return np.linspace(-_reach(rounds), _reach(rounds), _STATES)


def _one_look_back(before: int, after: int, limit: float, beyond: Floats) -> Floats:
    """From each state at a look, the chance that the next or a later one is beyond its bound.

    Args:
        before: rounds of the look.
        after: rounds of the next.
        limit: cosine of the next one's bound.
        beyond: the chance from each state at the next look.
    """
    more, angles = after - before, _angles(after)
    # sin(psi)^2 is B, which is beta-distributed; psi is next to normal.
    middle, spread = math.atan(math.sqrt(before / more)), 8 / (2 * math.sqrt(after / 2 + 1))
    psi, weight = _nodes(_BETA_NODES, max(0.0, middle - spread), min(math.pi / 2, middle + spread))
    log_density = (before - 1) * np.log(np.sin(psi)) + (more - 1) * np.log(np.cos(psi))
    weight = weight * 2 * np.exp(log_density - betaln(before / 2, more / 2))
    kept = math.sqrt(before / after) * np.sin(_angles(before))[:, None] * np.sin(psi)  # states x nodes of B
    added = math.sqrt(more / after) * np.cos(psi)
    if more == 1:  # one round has no direction but the two
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
    """Of the angle whose sine is the cosine of so many normal rounds."""
    return np.asarray(np.exp((rounds - 2) * np.log(np.cos(angle)) - betaln(0.5, (rounds - 1) / 2)))


def _above(cosine: Floats, rounds: int) -> Floats:
    """The chance that the cosine of so many normal rounds is above `cosine`."""
    half = (rounds - 1) / 2
    return np.asarray(betainc(half, half, (1 - cosine) / 2))


def _nodes(count: int, low: float, high: float) -> tuple[Floats, Floats]:
    """Nodes and weights of Gauss and Legendre from `low` to `high`."""
    nodes, weights = np.polynomial.legendre.leggauss(count)
    return low + (nodes + 1) * (high - low) / 2, weights * (high - low) / 2
