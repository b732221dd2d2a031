"""Score: loss, time and memory of a configuration as one number in nats. Higher is better."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any, Protocol

from stackwise.support.arguments import check_number, require

__all__ = ["ScoreWeights", "score_config"]


class _Run(Protocol):
    """Run with a score: a `PrototypeRun` or a `TrialOutcome`."""

    @property
    def status(self) -> str: ...
    @property
    def tokens_per_second(self) -> float | None: ...
    @property
    def peak_bytes(self) -> int | None: ...


class _Forward(Protocol):
    """Separate measurement of speed and memory: a `ForwardPass`."""

    @property
    def tokens_per_second(self) -> float | None: ...
    @property
    def peak_bytes(self) -> int | None: ...


@dataclass(frozen=True)
class ScoreWeights:
    """Value of a factor of two in time and in memory, in nats of loss.

    If the number of tokens of a compute-optimal run is doubled, its loss decreases by some hundredths of a
    nat to a tenth (Hoffmann et al. 2022, arXiv:2203.15556). A model that is twice as fast sees twice the
    tokens, hence the default of `time`. Memory has a lower value, because it can be traded for time.

    Attributes:
        time: nats per halving of the seconds per token, at least 0.
        memory: nats per halving of the peak memory, at least 0. With 0, no peak is required.
        reference_tokens_per_second: speed for which the time term is 0.
        reference_peak_bytes: peak for which the memory term is 0. Other references shift all scores by the
            same number and do not change their order.
    """

    time: float = 0.1
    memory: float = 0.05
    reference_tokens_per_second: float = 1e6
    reference_peak_bytes: float = 2.0**30

    def __post_init__(self) -> None:
        for key in ("time", "memory"):
            check_number(key, getattr(self, key), "a number >= 0", lambda number: number >= 0)
        for key in ("reference_tokens_per_second", "reference_peak_bytes"):
            check_number(key, getattr(self, key), "a number above 0", lambda number: number > 0)

    def to_dict(self) -> dict[str, Any]:
        """Return plain values."""
        return asdict(self)


def score_config(run: _Run, forward: _Forward | None = None, weights: ScoreWeights | None = None) -> float:
    """Return the score of a configuration in nats. Higher is better.

        - loss  -  time * log2(reference_tokens_per_second / tokens_per_second)
                -  memory * log2(peak_bytes / reference_peak_bytes)

    All terms have the same unit and are monotone: a lower loss, more tokens/s or a smaller peak never lowers
    the score. A difference of two scores has the same meaning everywhere. The loss is `validation_loss` if it
    is known, otherwise `final_loss` or `loss`.

    Args:
        run: result of training: a `PrototypeRun` or a `TrialOutcome`.
        forward: replacement for the speed and peak of `run`, for example if inference matters.
        weights: default `ScoreWeights()`.

    Returns:
        A finite number. -inf if `run` is not a success, so that it ranks after all successes.

    Raises:
        ValueError: the speed, or a peak with a weight, was not measured.
    """
    weights = ScoreWeights() if weights is None else weights
    if run.status != "success":
        return -math.inf
    found = next(
        value
        for value in (getattr(run, key, None) for key in ("validation_loss", "final_loss", "loss"))
        if value is not None
    )
    score = -float(found)
    measured = run if forward is None else forward
    if weights.time:
        rate = measured.tokens_per_second
        require(rate is not None and rate > 0, "tokens_per_second", rate, "a number above 0: it has a weight")
        assert rate is not None
        score -= weights.time * math.log2(weights.reference_tokens_per_second / rate)
    if weights.memory:
        peak = measured.peak_bytes
        require(peak is not None and peak > 0, "peak_bytes", peak, "a number above 0: it has a weight")
        assert peak is not None
        score -= weights.memory * math.log2(peak / weights.reference_peak_bytes)
    return score
