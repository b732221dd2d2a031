"""Cloze: texts whose end a model is asked for."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from stackwise.quality.proportion import Proportion
from stackwise.quality.request import Request, Score
from stackwise.quality.scoring import Scorer
from stackwise.support.arguments import require

__all__ = ["ClozeResult", "score_cloze"]


@dataclass(frozen=True)
class ClozeResult:
    """How the ends of texts were scored.

    Attributes:
        requests: as they were asked.
        scores: one for each.
    """

    requests: tuple[Request, ...]
    scores: tuple[Score, ...]

    metric = "acc"

    def correct(self) -> np.ndarray:
        """bool (texts,): where each token of the end is the most likely one."""
        return np.array([score.is_greedy for score in self.scores], dtype=bool)

    @property
    def figure(self) -> Proportion:
        """The share of ends that the model would have written itself."""
        return Proportion.of(self.correct())

    @property
    def perplexity(self) -> float:
        """e to the mean negative log-probability of a whole end, as LAMBADA counts it.

        Infinite where that is too large for a number.
        """
        try:
            return math.exp(-math.fsum(score.log_probability for score in self.scores) / len(self.scores))
        except OverflowError:
            return math.inf

    @property
    def cut(self) -> int:
        """How many tokens of contexts were left out for want of room."""
        return sum(score.cut for score in self.scores)

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return {
            "metric": self.metric,
            "acc": self.figure.to_dict(),
            "perplexity": self.perplexity,
            "cut_tokens": self.cut,
        }


def score_cloze(scorer: Scorer, requests: Sequence[Request | tuple[str, str]]) -> ClozeResult:
    """Score the end of each text after its context.

    Raises:
        ValueError: no text, or as `Scorer.score` does.
    """
    require(len(requests) > 0, "requests", len(requests), "at least one")
    asked = tuple(Request(*each) for each in requests)
    return ClozeResult(asked, tuple(scorer.score(asked)))
