"""Latency limits: the longest time that a call or the tokens of a generation may take, as percentiles."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from stackwise.benchmark.generation import LATENCIES, GenerationMeasurement
from stackwise.benchmark.timing.measurement import LEAST_CALLS
from stackwise.benchmark.timing.percentile import least_count
from stackwise.support.arguments import check_choice, require
from stackwise.support.units import parse_seconds, time_text

if TYPE_CHECKING:
    from stackwise.benchmark.timing.measurement import Measurement
    from stackwise.benchmark.workload import Workload

__all__ = ["LatencyError", "LatencyLimit", "least_arguments", "require_within"]

_MOST_DIGITS = 17  # significant digits of a float


class LatencyError(AssertionError):
    """Latency above the limit of the marker max_latency, or too few samples to decide."""


@dataclass(frozen=True)
class LatencyLimit:
    """Limits of one marker max_latency.

    Attributes:
        seconds: longest allowed time in seconds, by percentile: {95: 0.02}.
        of: "ttft", "itl", "tpot" or "e2e" of a generation. None: "itl" of a generation, otherwise the time
            of a call.
    """

    seconds: Mapping[int, float]
    of: str | None = None

    @classmethod
    def read(
        cls, p50: str | None = None, p95: str | None = None, p99: str | None = None, of: str | None = None
    ) -> LatencyLimit:
        """Return the limits that the arguments of a marker define.

        Raises:
            ValueError: no percentile, a time that is invalid or 0, or an unknown `of`.
        """
        given = {q: value for q, value in ((50, p50), (95, p95), (99, p99)) if value is not None}
        require(bool(given), "p50, p95, p99", None, "a time such as '20ms' for one of them at least")
        seconds = {q: parse_seconds(f"p{q}", value) for q, value in given.items()}
        for q, value in seconds.items():
            require(value > 0, f"p{q}", given[q], "a time above 0")
        if of is not None:
            check_choice("of", of, LATENCIES)
        return cls(seconds, of)


def least_arguments(limits: Sequence[LatencyLimit], workload: Workload) -> dict[str, Any]:
    """Return the keywords that `measure` or `measure_generation` needs so that the limits can be judged.

    The number of calls is never below the default of these functions, because the gaps between the tokens of
    one generation are not independent.

    Args:
        limits: one or more limits, the closest to the test first.
        workload: the measured workload.

    Raises:
        ValueError: the workload does not have a latency that a limit names.
    """
    judged = _most_seconds(limits, generates=workload.each_token is not None)
    found = {"min_calls": max(LEAST_CALLS, *(_least_calls(of, q, workload) for of, q in judged))}
    if workload.each_token is None and any(q != 50 for _, q in judged):
        found["calls_per_sample"] = 1  # a mean of several calls hides slow calls
    return found


def require_within(
    limits: Sequence[LatencyLimit], found: Measurement | GenerationMeasurement, said: Mapping[str, Any]
) -> None:
    """Compare a measurement with the limits.

    Args:
        limits: one or more limits, the closest to the test first.
        found: the measurement.
        said: keyword arguments of the measurement that the test set. They override `least_arguments`.

    Raises:
        LatencyError: a latency is above its limit, or there are too few samples to decide.
    """
    __tracebackhide__ = True
    beyond = []
    own = ", ".join(f"{key}={said[key]!r}" for key in ("min_calls", "calls_per_sample") if key in said)
    generates = isinstance(found, GenerationMeasurement)
    for (of, q), most in _most_seconds(limits, generates=generates).items():
        if isinstance(found, GenerationMeasurement):
            assert of is not None
            name, samples = f"p{q} of {of.upper()}", found.percentile(q, of)
        else:
            name, samples = f"p{q}", found.percentile(q)
        if samples is None or samples.value is None:
            count = 0 if samples is None else samples.count
            why = f"; the test itself says {own}" if own else ""
            beyond.append(
                f"{name} is not known of {count} samples: it takes {least_count(q)}, each of one call{why}"
            )
        elif samples.value > most:
            was, allowed = _told_apart(samples.value, most)
            beyond.append(f"{name} was {was}; allowed: at most {allowed}")
    if beyond:
        steady = "" if found.steady else f" (not steady: {found.warmup.reason})"
        raise LatencyError(f"max_latency: {'; '.join(beyond)}{steady}")


def _most_seconds(limits: Sequence[LatencyLimit], *, generates: bool) -> dict[tuple[str | None, int], float]:
    """Return the longest allowed time by latency and percentile, from the first limit that contains it."""
    found: dict[tuple[str | None, int], float] = {}
    for limit in limits:
        of = (limit.of or "itl") if generates else limit.of
        for q, most in limit.seconds.items():
            found.setdefault((of, q), most)
    return found


def _least_calls(of: str | None, q: int, workload: Workload) -> int:
    """Return the number of calls that are needed to estimate a percentile.

    Raises:
        ValueError: the workload does not have this latency.
    """
    least = least_count(q)
    if workload.each_token is None:
        require(of is None, "of", of, f"none here, since {workload.name} does not tell its tokens")
        return least
    if of not in ("itl", "tpot"):
        return least
    gaps = workload.new_tokens - 1
    require(gaps > 0, "new_tokens", workload.new_tokens, f"2 or more, of which {of} is known")
    return least if of == "tpot" else math.ceil(least / gaps)


def _told_apart(value: float, most: float) -> tuple[str, str]:
    """Return both times as text, with enough digits to show that they differ."""
    for digits in range(4, _MOST_DIGITS):
        texts = time_text(value, digits), time_text(most, digits)
        if texts[0] != texts[1]:
            return texts
    return time_text(value, _MOST_DIGITS), time_text(most, _MOST_DIGITS)
