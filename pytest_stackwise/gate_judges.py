"""Plugins that judge or record benchmarks, switched off because a run of the gate has no benchmarks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

__all__ = ["switch_off"]

# Options of pytest-benchmark that write or compare its measurements.
_OF_BENCHMARK = (
    "benchmark_json",
    "benchmark_save",
    "benchmark_autosave",
    "benchmark_histogram",
    "benchmark_compare",
    "benchmark_compare_fail",
)


def switch_off(config: pytest.Config) -> Iterator[str]:
    """Switch off plugins that would judge a run of the gate, and yield a note for each that was in use.

    The benchmarks run in the processes of the sides, and this run only shows their verdicts. Therefore
    pytest-cov sees no code, pytest-benchmark has no measurements, and the run takes longer than its tests.
    """
    yield from _benchmark(config)
    coverage: Any = config.pluginmanager.get_plugin("_cov")
    if coverage is not None and coverage.options.cov_fail_under:
        coverage.options.cov_fail_under = None
        yield "--cov-fail-under is not judged: the benchmarks run in other processes, without coverage"
    # Name of the entry point, or of the module after `-p pytest_timeout`.
    for name in ("timeout", "pytest_timeout"):
        expires: Any = getattr(config.pluginmanager.get_plugin(name), "SESSION_EXPIRE_KEY", None)
        if expires is not None and config.stash.get(expires, 0):
            config.stash[expires] = 0
            yield "--session-timeout is not judged: --stackwise-gate-seconds limits the comparison"


def _benchmark(config: pytest.Config) -> Iterator[str]:
    given = [name for name in _OF_BENCHMARK if config.getoption(name, None)]
    session: Any = getattr(config, "_benchmarksession", None)
    if session is None or not given:
        return
    # Otherwise pytest-benchmark warns that no benchmarks were run, and a warning may be an error.
    session.json = session.save = session.autosave = session.compare = None
    names = ", ".join(f"--{name.replace('_', '-')}" for name in given)
    yield (
        f"{names}: without effect, since pytest-benchmark measures nothing in this run; "
        "--stackwise-gate-report writes the result"
    )
