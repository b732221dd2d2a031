"""Variations: ways to ask a model for the same function. Each is one file with one class."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Mapping
from functools import cache

from stackwise.checks.engine.variation import Suite, Switch, Variation

__all__ = ["known_variations"]


@cache
def known_variations(suite: Suite = "full") -> Mapping[str, Variation]:
    """Return every variation of a suite by name, those with the lowest rank first."""
    for module in pkgutil.iter_modules(__path__, __name__ + "."):
        importlib.import_module(module.name)
    kinds = {*Variation.__subclasses__(), *Switch.__subclasses__()} - {Switch}
    found = sorted((kind() for kind in kinds), key=lambda each: each.rank)
    return {each.name: each for each in found if suite == "full" or each.suite == "fast"}
