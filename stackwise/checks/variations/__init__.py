"""Variations: ways to ask a model for the same function. Each is one class."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Iterator, Mapping
from functools import cache

from stackwise.checks.engine.variation import Suite, Variation

__all__ = ["known_variations"]


@cache
def known_variations(suite: Suite = "full") -> Mapping[str, Variation]:
    """Return every variation of a suite by name, those with the lowest rank first."""
    for module in pkgutil.iter_modules(__path__, __name__ + "."):
        importlib.import_module(module.name)
    found = sorted((kind() for kind in _kinds(Variation)), key=lambda each: (each.rank, each.name))
    return {each.name: each for each in found if suite == "full" or each.suite == "fast"}


def _kinds(base: type[Variation]) -> Iterator[type[Variation]]:
    """Yield the subclasses that have a name, at any depth."""
    for kind in base.__subclasses__():
        if "name" in vars(kind):
            yield kind
        yield from _kinds(kind)
