"""Score: loss, time and memory of a configuration as one number, in nats; higher is better."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any, Protocol

from stackwise.support.arguments import check_number, require

__all__ = ["ScoreWeights", "score_config"]


class _Run(Protocol):
    """What a score is of: a `PrototypeRun`, or a `TrialOutcome`."""

    @property
    def status(self) -> str: ...
    @property
    def tokens_per_second(self) -> float | None: ...
    @property
    def peak_bytes(self) -> int | None: ...


class _Forward(Protocol):
    """What else may be known of speed and memory: a `ForwardPass`."""

    @property
    def tokens_per_second(self) -> float | None: ...
    @property
    def peak_bytes(self) -> int | None: ...


@dataclass(frozen=True)
class ScoreWeights:
    """What a factor of two in time and in memory is worth, in nats of loss.

    A doubling of the tokens of a compute-optimal run lowers its loss by some hundredths of a nat to a tenth
    (Hoffmann et al. 2022, arXiv:2203.15556), and what is twice as fast sees twice the tokens: hence the
    default of `time`. Memory is worth less, since it can be bought with time.

    Attributes:
        time: nats for each halving of the seconds a token, at least 0.
        memory: nats for each halving of the peak, at least 0; 0 needs no peak.
        reference_tokens_per_second: the speed at which the term of time is 0.
        reference_peak_bytes: the peak at which the term of memory is 0. Other references move all scores
            by the same number, so that no two configurations change places.
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
        """Plain values."""
        return asdict(self)


def score_config(run: _Run, forward: _Forward | None = None, weights: ScoreWeights | None = None) -> float:
    """How good a configuration is, in nats: the higher, the better.

        - loss  -  time * log2(reference_tokens_per_second / tokens_per_second)
                -  memory * log2(peak_bytes / reference_peak_bytes)

    All terms are in one unit and each is monotone: a lower loss, more tokens/s and a smaller peak never lower
    the score, and a difference of two scores means the same wherever it is. The loss is `validation_loss`
    where there is one, `final_loss` or `loss` otherwise.

    Args:
        run: what training showed: a `PrototypeRun` or a `TrialOutcome`.
        forward: whose speed and peak are taken in place of those of `run`, as where what is wanted is
            inference.
        weights: default `ScoreWeights()`.

    Returns:
        A finite number; -inf where `run` is no success, so that such a one is behind all others.

    Raises:
        ValueError: a speed, or a peak that has a weight, was not measured.
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
