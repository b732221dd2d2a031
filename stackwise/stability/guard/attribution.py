"""Blame: attributes a bad step to a part of the model by its gradient norms."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from statistics import median

__all__ = ["attributed_module", "first_names", "median_norms"]

_ROOT = "(outside the submodules)"
_SHOWN = 3
_NEGLIGIBLE = 1e-6  # share of the total norm: smaller gradients change by rounding errors
_ALL = 0.9  # share of the modules: some may have a small gradient by chance


def attributed_module(norms: Mapping[str, float], reference: Mapping[str, float] | None = None) -> str:
    """Return the part of the model that caused a bad step with these gradient norms.

    A fault of the backward pass reaches all modules that are earlier in the model. So the function names the
    module that departs first in backward order, the reverse of the registration order.

    Args:
        norms: gradient norm of each parameter, by name, in the order of the model.
        reference: norms of a healthy step. None: no reference.

    Returns:
        For non-finite norms: the parameters in backward order, or "all modules (non-finite gradients)". For
        finite norms: the parameter whose norm rose by more than the square root of the largest rise, or the
        module with all such parameters. If that is the entire model: "all modules (gradients x10)", or the
        first module in backward order. Without a reference: the parameter with the largest norm.
    """
    broken = [name for name, norm in norms.items() if not math.isfinite(norm)]
    if broken:
        every = len(broken) == len(norms) > _SHOWN
        return "all modules (non-finite gradients)" if every else first_names(broken[::-1])
    if not norms:
        return ""
    known, total = reference or {}, math.hypot(*norms.values())
    compared = [
        name
        for name, norm in norms.items()
        if norm > _NEGLIGIBLE * total and 0 < known.get(name, 0.0) < math.inf
    ]
    rises = {name: math.log(norms[name] / known[name]) for name in compared}
    largest = max(rises.values(), default=0.0)
    if largest <= 0:
        return max(norms, key=lambda name: norms[name])
    risen = [name for name, rise in rises.items() if rise > largest / 2]
    if len(risen) == 1:
        return risen[0]
    common = _common_module(risen)
    if common != _common_module(compared):
        return common
    return _among_all(norms, known, compared)


def _among_all(norms: Mapping[str, float], known: Mapping[str, float], names: Sequence[str]) -> str:
    """Return "all modules (gradients xFACTOR)", or the first affected module in backward order."""
    modules: dict[str, list[str]] = {}
    for name in names:
        modules.setdefault(name.rpartition(".")[0], []).append(name)

    def rise(members: Sequence[str]) -> float:
        before, now = (math.hypot(*(each[name] for name in members)) for each in (known, norms))
        return math.log(now / before)

    rises, whole = {module: rise(members) for module, members in modules.items()}, rise(names)
    affected = sum(each > whole / 3 for each in rises.values())
    if whole > 0 and affected >= _ALL * len(rises):
        return f"all modules (gradients x{_factor(math.exp(whole))})"
    largest = max(rises.values())
    return [module for module, each in rises.items() if each > largest / 2][-1] or _ROOT


def median_norms(steps: Iterable[Mapping[str, float]]) -> dict[str, float]:
    """Return the median norm of each parameter over healthy steps."""
    known: dict[str, list[float]] = {}
    for norms in steps:
        for name, norm in norms.items():
            known.setdefault(name, []).append(norm)
    return {name: median(found) for name, found in known.items()}


def first_names(names: Sequence[str]) -> str:
    """Return the first names as text, with the number of further names."""
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more


def _factor(factor: float) -> str:
    if factor < 10:
        return f"{factor:.1f}"
    return f"{factor:.0f}" if factor < 1e6 else f"{factor:.1e}"


def _common_module(names: Iterable[str]) -> str:
    common: list[str] | None = None
    for name in names:
        parts = name.split(".")[:-1]
        if common is None:
            common = parts
        matching = (a == b for a, b in zip(common, parts, strict=False))
        same = next((i for i, equal in enumerate(matching) if not equal), min(len(common), len(parts)))
        common = common[:same]
    return ".".join(common or []) or _ROOT
