"""Latency: the most that a call, or the tokens of a generation, may take, as percentiles."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from stackwise.argument import check_choice, require
from stackwise.benchmark.generation import LATENCIES, GenerationMeasurement
from stackwise.benchmark.timing.percentile import least_count
from stackwise.gate.limit import parse_seconds

if TYPE_CHECKING:
    from stackwise.benchmark.timing.measurement import Measurement
    from stackwise.benchmark.workload import Workload

__all__ = ["LatencyError", "LatencyLimit", "least_arguments", "require_within"]


class LatencyError(AssertionError):
    """More time was measured than the marker max_latency allows, or too few samples to know."""


@dataclass(frozen=True)
class LatencyLimit:
    """What one marker allows.

    Attributes:
        seconds: the most, by percentile: {95: 0.02}.
        of: "ttft", "itl", "tpot" or "e2e" of a generation; None: of whatever is measured, and of a generation
            "itl".
    """

    seconds: Mapping[int, float]
    of: str | None = None

    @classmethod
    def read(
        cls, p50: str | None = None, p95: str | None = None, p99: str | None = None, of: str | None = None
    ) -> LatencyLimit:
        """What the arguments of a marker say.

        Raises:
            ValueError: no percentile, a time that is not understood or is 0, or another `of`.
        """
        given = {q: value for q, value in ((50, p50), (95, p95), (99, p99)) if value is not None}
        require(bool(given), "p50, p95, p99", None, "a time such as '20ms' for one of them at least")
        seconds = {q: parse_seconds(f"p{q}", value) for q, value in given.items()}
        for q, value in seconds.items():
            require(value > 0, f"p{q}", given[q], "a time above 0")
        if of is not None:
            check_choice("of", of, LATENCIES)
        return cls(seconds, of)

    def least_calls(self, workload: Workload) -> int:
        """How many calls it takes to know these percentiles.

        Raises:
            ValueError: the work has no such latency.
        """
        least = max(map(least_count, self.seconds))
        if workload.each_token is None:
            require(
                self.of is None, "of", self.of, f"none here, since {workload.name} does not tell its tokens"
            )
            return least
        if self.of not in (None, "itl", "tpot"):
            return least
        gaps, wanted = workload.new_tokens - 1, f"2 or more, of which {self.of or 'itl'} is known"
        require(gaps > 0, "new_tokens", workload.new_tokens, wanted)
        return least if self.of == "tpot" else math.ceil(least / gaps)


def least_arguments(limits: Sequence[LatencyLimit], workload: Workload) -> dict[str, Any]:
    """What `measure` or `measure_generation` has to be told for the limits, one or more, to be judged.

    Raises:
        ValueError: the work has no such latency.
    """
    found = {"min_calls": max(limit.least_calls(workload) for limit in limits)}
    if workload.each_token is None and any(set(limit.seconds) - {50} for limit in limits):
        found["calls_per_sample"] = 1  # a mean of several hides the slow ones
    return found


def require_within(limits: Sequence[LatencyLimit], found: Measurement | GenerationMeasurement) -> None:
    """Hold a measurement to the limits.

    Raises:
        LatencyError: it is beyond one, or too few samples were taken to know.
    """
    __tracebackhide__ = True
    beyond = []
    for limit in limits:
        for q, most in limit.seconds.items():
            if isinstance(found, GenerationMeasurement):
                of = limit.of or "itl"
                name, samples = f"p{q} of {of.upper()}", found.percentile(q, of)
            else:
                name, samples = f"p{q}", found.percentile(q)
            if samples is None or samples.value is None:
                count = 0 if samples is None else samples.count
                beyond.append(
                    f"{name} is not known of {count} samples: it takes {least_count(q)}, each of one call"
                )
            elif samples.value > most:
                beyond.append(f"{name} was {_text(samples.value)}; allowed: at most {_text(most)}")
    if beyond:
        steady = "" if found.steady else f" (not steady: {found.warmup.reason})"
        raise LatencyError(f"max_latency: {'; '.join(beyond)}{steady}")


def _text(seconds: float) -> str:
    scale, unit = (1.0, "s") if seconds >= 1 else (1e3, "ms") if seconds >= 1e-3 else (1e6, "us")
    return f"{seconds * scale:.4g} {unit}"
