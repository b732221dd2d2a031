"""Cloze: tasks in which a model completes a text."""

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
    """Scores of the ends of texts.

    Attributes:
        requests: scored requests.
        scores: one score per request.
    """

    requests: tuple[Request, ...]
    scores: tuple[Score, ...]

    metric = "acc"

    def correct(self) -> np.ndarray:
        """Return bool (texts,): True if each token of the end is the most likely one."""
        return np.array([score.is_greedy for score in self.scores], dtype=bool)

    @property
    def figure(self) -> Proportion:
        """Share of texts with an end that equals the model's greedy continuation."""
        return Proportion.of(self.correct())

    @property
    def perplexity(self) -> float:
        """Exponential of the mean negative log-probability of an end, as in LAMBADA.

        Infinite if it exceeds the range of a float.
        """
        try:
            return math.exp(-math.fsum(score.log_probability for score in self.scores) / len(self.scores))
        except OverflowError:
            return math.inf

    @property
    def cut(self) -> int:
        """Number of context tokens that were cut because the sequence was too long."""
        return sum(score.cut for score in self.scores)

    def to_dict(self) -> dict[str, Any]:
        """Return plain values, for JSON."""
        return {
            "metric": self.metric,
            "acc": self.figure.to_dict(),
            "perplexity": self.perplexity,
            "cut_tokens": self.cut,
        }


def score_cloze(scorer: Scorer, requests: Sequence[Request | tuple[str, str]]) -> ClozeResult:
    """Score the end of each text after its context.

    Raises:
        ValueError: no texts, or an error of `Scorer.score`.
    """
    require(len(requests) > 0, "requests", len(requests), "at least one")
    asked = tuple(Request(*each) for each in requests)
    return ClozeResult(asked, tuple(scorer.score(asked)))
