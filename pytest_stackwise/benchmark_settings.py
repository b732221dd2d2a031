"""Benchmark settings: which of pytest-benchmark's our own loop follows, and a note on each that it cannot.

They come from its command line, or from the marker `benchmark` of a test, which wins. What the call of
`throughput` says itself wins over both, and of calls there are at least as many as a limit of the test takes.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Callable, Mapping
from typing import Any

import pytest

__all__ = ["followed", "replayed"]

_PREFIX = "--benchmark-"
_CHOSEN = pytest.StashKey[dict[str, tuple[str, Any]]]()


def _warmup_seconds(warmup: Any) -> dict[str, float]:
    """Ours is always on; without it only the first window of calls is left."""
    return {} if warmup else {"warmup_seconds": 0.0}


# Keywords of `measure` and `measure_generation` that say the same.
_FOLLOWED: Mapping[str, Callable[[Any], dict[str, Any]]] = {
    "min_rounds": lambda rounds: {"min_calls": int(rounds)},
    "max_time": lambda seconds: {"min_seconds": float(seconds)},
    "warmup": _warmup_seconds,
}
_NOT_FOLLOWED: Mapping[str, str] = {
    "min_time": "a sample is one call, or as many as take 50 us; see calls_per_sample",
    "timer": "the clock is 'host' or 'device'; see clock",
    "calibration_precision": "nothing is calibrated; see calls_per_sample",
    "warmup_iterations": "the warm-up ends when the time of a call has settled; see warmup_seconds",
    "precision": "all samples are kept, and percentiles have intervals; see min_calls",
    "cprofile": "samples are replayed, and a profile would be of the replay",
}


def followed(item: pytest.Item, arguments: Mapping[str, Any]) -> tuple[dict[str, Any], tuple[str, ...]]:
    """The keywords that pytest-benchmark's settings add to a measurement, and notes on the others.

    Args:
        item: the test, of which `replayed` was asked before.
        arguments: of the call, which win.
    """
    added: dict[str, Any] = {}
    notes = []
    for name, (source, value) in item.stash[_CHOSEN].items():
        if name in _NOT_FOLLOWED:
            notes.append(f"{source} is not followed: {_NOT_FOLLOWED[name]}")
            continue
        for key, wanted in _FOLLOWED[name](value).items():
            if key not in arguments:
                added[key] = wanted
            elif arguments[key] != wanted:
                notes.append(f"{source} is not followed: the test itself says {key}={arguments[key]!r}")
    return added, tuple(notes)


def replayed(item: pytest.Item, timer: Callable[[], float]) -> dict[str, Any]:
    """The settings of the marker `benchmark` under which pytest-benchmark replays samples, and nothing else.

    Args:
        item: the test.
        timer: that the samples are read from.
    """
    # A test that is run again has our marker on it already.
    item.stash.setdefault(_CHOSEN, _chosen(item))
    marker = item.get_closest_marker("benchmark")
    settings = dict(marker.kwargs) if marker else {}
    # What would have it stop before all samples are through, or make calls beyond them.
    for name in ("precision", "cprofile"):
        if hasattr(item.config.option, f"benchmark_{name}"):
            settings[name] = None
    return settings | {"timer": timer}


def _chosen(item: pytest.Item) -> dict[str, tuple[str, Any]]:
    """Of each setting that somebody chose: how it was written, and its value."""
    config = item.config
    words = [
        *config.getini("addopts"),
        *shlex.split(os.environ.get("PYTEST_ADDOPTS", "")),
        *map(str, config.invocation_params.args),
    ]
    found: dict[str, tuple[str, Any]] = {}
    for place, word in enumerate(words):
        option, _, written = word.partition("=")
        name = option.removeprefix(_PREFIX).replace("-", "_")
        if not option.startswith(_PREFIX) or name not in {**_FOLLOWED, **_NOT_FOLLOWED}:
            continue
        written = written or next(iter(words[place + 1 : place + 2]), "")
        if name == "warmup" and written.strip().lower() == "auto":
            found.pop(name, None)  # pytest-benchmark's choice is then its own
            continue
        found[name] = (option, config.getoption(f"benchmark_{name}"))
    marker = item.get_closest_marker("benchmark")
    for name, value in (marker.kwargs if marker else {}).items():
        if name in _FOLLOWED or name in _NOT_FOLLOWED:
            found[name] = (f"benchmark({name}={value!r})", value)
    return found
