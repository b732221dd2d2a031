"""Variations: ways to ask a model for the same function. Each is one file with one class."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Mapping
from functools import cache

from stackwise.checks.engine.variation import Suite, Variation

__all__ = ["known_variations"]


@cache
def known_variations(suite: Suite = "full") -> Mapping[str, Variation]:
    """Return every variation of a suite by name, those with the lowest rank first."""
    modules = pkgutil.iter_modules(__path__, __name__ + ".")
    everything = [each for m in modules for each in vars(importlib.import_module(m.name)).values()]
    kinds = {each for each in everything if isinstance(each, type) and issubclass(each, Variation)}
    found = sorted(
        (kind() for kind in kinds if "name" in vars(kind)), key=lambda each: (each.rank, each.name)
    )
    return {each.name: each for each in found if suite == "full" or each.suite == "fast"}
