"""Initial facts: standard deviations of new weights, compared with the claims."""

from __future__ import annotations

import math
from collections import defaultdict
from fnmatch import fnmatchcase
from statistics import fmean

from stackwise.checks.probe.claimed import Pair, UnmeasuredError, claimed
from stackwise.checks.subject import Subject
from stackwise.support.arguments import require

# Required number of elements of a weight, over all new models, and largest number of new models.
_ELEMENTS, _MOST_DRAWS = 8_000, 8
_TRUNCATED = 0.8796  # standard deviation of a normal distribution that is cut off at -2 and 2
_LIMIT = 0.05  # more than five standard errors, 1 / sqrt(2 * elements) each


@claimed(
    "standard deviation",
    place="weight",
    advice="Look for modules that the initialisation skips, for a wrong or missing factor of the depth, and "
    "for a variance in place of a standard deviation.",
    reason=f"a weight with at least {_ELEMENTS // _MOST_DRAWS} elements",
    limit=_LIMIT,
)
def claimed_initial_std(subject: Subject, claim: dict[str, float]) -> list[Pair]:
    """Do new weights have the claimed standard deviation?"""
    if subject.spec.trained:
        raise UnmeasuredError("the weights are trained")
    sizes = {name: p.numel() for name, p in subject.model().named_parameters()}
    wanted: dict[str, float] = {}
    for pattern, std in claim.items():
        names = [name for name in sizes if fnmatchcase(name, pattern)]
        require(bool(names), "initial_std", pattern, f"a pattern of names such as {next(iter(sizes), '')}")
        wanted |= dict.fromkeys(names, float(std))
    enough = [name for name in wanted if sizes[name] * _MOST_DRAWS >= _ELEMENTS]
    n_draws = math.ceil(_ELEMENTS / min((sizes[name] for name in enough), default=_ELEMENTS))
    squares: dict[str, list[float]] = defaultdict(list)
    for draw in range(max(2, n_draws)):
        weights = dict(subject.spec.create(seed=subject.seed + draw).named_parameters())
        for name in enough:
            squares[name].append(float(weights[name].detach().double().square().mean()))
    if any(means[0] == means[1] for means in squares.values()):
        raise UnmeasuredError("needs a function that builds a model with new weights in each call")
    pairs: list[Pair] = []
    for name, std in wanted.items():
        value = math.sqrt(fmean(squares[name])) if name in squares else None
        is_truncated = value is not None and abs(value / (_TRUNCATED * std) - 1) <= _LIMIT
        pairs.append((std if is_truncated else value, std))
    return pairs
