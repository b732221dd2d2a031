"""Benchmark items: tests that the gate measures, and a note on benchmarks that it does not measure."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Sequence
from types import CodeType
from typing import Any

import pytest

__all__ = ["FIXTURES", "gated", "not_gated", "requests_benchmark"]

FIXTURES = ("benchmark", "throughput")
_OTHERS = ("codspeed_benchmark",)  # a marker and a fixture of pytest-codspeed
_SHOWN = 3


def gated(items: Iterable[pytest.Item]) -> list[pytest.Item]:
    """Return the tests that use `benchmark` or `throughput`, also by `request.getfixturevalue`.

    A call of `getfixturevalue` is found if it is in the test function or in a fixture of the test, and if the
    name is a literal.
    """
    return [item for item in items if set(FIXTURES) & set(_fixtures(item)) or requests_benchmark(item)]


def requests_benchmark(item: pytest.Item) -> bool:
    """Return True if a test or one of its fixtures calls `getfixturevalue` and names a benchmark fixture."""
    info: Any = getattr(item, "_fixtureinfo", None)
    definitions = [] if info is None else info.name2fixturedefs.values()
    functions = [getattr(item, "function", None), *(each[-1].func for each in definitions if each)]
    return any(_asks_for_benchmark(function) for function in functions)


def not_gated(items: Sequence[pytest.Item], measured: Sequence[pytest.Item]) -> list[str]:
    """Return a list with a note on the benchmarks among `items` that are not measured, or an empty list."""
    known = set(measured)
    others = [item for item in items if item not in known and _is_other_benchmark(item)]
    if not others:
        return []
    return [f"{_names(others)}: not gated, since the test does not use `benchmark` or `throughput`"]


def _names(items: Sequence[pytest.Item]) -> str:
    shown = ", ".join(item.nodeid for item in items[:_SHOWN])
    return shown if len(items) <= _SHOWN else f"{shown} and {len(items) - _SHOWN} more"


def _is_other_benchmark(item: pytest.Item) -> bool:
    """Return True for a test that pytest-codspeed measures as a whole."""
    names = [*_OTHERS, *(["benchmark"] if item.config.pluginmanager.hasplugin("codspeed") else [])]
    return any(item.get_closest_marker(name) for name in names) or bool(set(_OTHERS) & set(_fixtures(item)))


def _fixtures(item: pytest.Item) -> Sequence[str]:
    found: Sequence[str] = getattr(item, "fixturenames", ())
    return found


def _asks_for_benchmark(function: Any) -> bool:
    code = getattr(inspect.unwrap(function), "__code__", None) if function is not None else None
    if not isinstance(code, CodeType):
        return False
    return "getfixturevalue" in code.co_names and any(name in code.co_consts for name in FIXTURES)
