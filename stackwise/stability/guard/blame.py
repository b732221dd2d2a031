"""Blame: the part of a model that a broken gradient points to, as far as the norms of its parameters tell."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

__all__ = ["blamed", "listed"]

_ROOT = "(the model itself)"
_SHOWN = 3


def blamed(norms: Mapping[str, float], reference: Mapping[str, float] | None = None) -> str:
    """What broke in a step with these gradient norms.

    Args:
        norms: of each parameter's gradient, by name.
        reference: the same of a sound step before it; None: there is none.

    Returns:
        Of norms that are not finite: the parameters, or "(the model itself)" where it is all of them. Else
        the smallest module that has every parameter whose norm rose, as a factor, by more than the square
        root of the largest rise; without a reference, the parameter with the largest norm.
    """
    broken = [name for name, norm in norms.items() if not math.isfinite(norm)]
    if broken:
        if len(broken) == len(norms) > _SHOWN:
            return _ROOT
        return listed(broken)
    if not norms:
        return ""
    known = reference or {}
    rises = {
        name: math.log(norm / known[name])
        for name, norm in norms.items()
        if norm > 0 and 0 < known.get(name, 0.0) < math.inf
    }
    largest = max(rises.values(), default=0.0)
    if largest <= 0:
        return max(norms, key=lambda name: norms[name])
    risen = [name for name, rise in rises.items() if rise > largest / 2]
    return risen[0] if len(risen) == 1 else _common_module(risen)


def listed(names: Sequence[str]) -> str:
    """Return the first names as text, and how many more there are."""
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more


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
