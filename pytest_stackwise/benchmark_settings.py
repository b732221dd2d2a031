"""Settings of pytest-benchmark that the fixture `throughput` uses, and notes on those that it does not use.

The settings come from the command line or from the marker `benchmark` of a test. The marker overrides the
command line, and the arguments of the call of `throughput` override both. If a latency limit of the test
needs more calls, the number of calls is raised, unless the call of `throughput` sets it.
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
    """Return the keyword that limits the warm-up to its first window of calls, or none if warm-up is on."""
    return {} if warmup else {"warmup_seconds": 0.0}


# Equivalent keywords of `measure` and `measure_generation`, per setting of pytest-benchmark.
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
    """Return keywords that settings of pytest-benchmark add to a measurement, and notes on unused settings.

    Args:
        item: the test. `replayed` must be called for it before.
        arguments: keyword arguments of the call of `throughput`. They override the settings.
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
    """Return the arguments of the marker `benchmark` for a replay of samples, without any other calls.

    The settings that the user chose are stored on the test, for `followed`.

    Args:
        item: the test.
        timer: timer from which pytest-benchmark reads the samples.
    """
    # In a rerun, the test already has the marker of this plugin, so the first result is used.
    item.stash.setdefault(_CHOSEN, _chosen(item))
    marker = item.get_closest_marker("benchmark")
    settings = dict(marker.kwargs) if marker else {}
    # These settings would stop the replay before the last sample, or add calls after it.
    for name in ("precision", "cprofile"):
        if hasattr(item.config.option, f"benchmark_{name}"):
            settings[name] = None
    return settings | {"timer": timer}


def _chosen(item: pytest.Item) -> dict[str, tuple[str, Any]]:
    """Return each setting that the user chose: name -> (option or marker as written, value)."""
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
            found.pop(name, None)  # pytest-benchmark decides, so this is no choice of the user
            continue
        found[name] = (option, config.getoption(f"benchmark_{name}"))
    marker = item.get_closest_marker("benchmark")
    for name, value in (marker.kwargs if marker else {}).items():
        if name in _FOLLOWED or name in _NOT_FOLLOWED:
            found[name] = (f"benchmark({name}={value!r})", value)
    return found
