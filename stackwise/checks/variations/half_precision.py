"""Half precision: the model in bfloat16 or float16, in which only NaN and inf count."""

from __future__ import annotations

import random

import torch

from stackwise.checks.engine.examination import HALF_PRECISION, Examination
from stackwise.checks.engine.question import Question
from stackwise.checks.engine.variation import Variation


class HalfPrecision(Variation):
    """Ask in half precision. Value: name of the dtype.

    A position, loss or gradient differs if it is not finite, but finite in a plain call in the same dtype.
    """

    name = "half_precision"
    question = "In bfloat16 and float16, is each result finite if it is finite in a plain call?"
    family = "finiteness"
    rank = 90
    compares_less = True
    advice = (
        "Look for masks of finfo.min that are added twice (their sum is -inf), for a softmax with all keys "
        "masked, and for a NaN that is multiplied by 0."
    )

    def missing(self, exam: Examination) -> str:
        """Require a model that runs in a half precision."""
        return "" if _dtypes(exam) else "needs a model whose output in bfloat16 or float16 is finite"

    def draw(self, exam: Examination, rng: random.Random) -> str:
        """Draw a dtype."""
        return rng.choice(_dtypes(exam))

    def text(self, value: str) -> str:
        """Return the dtype."""
        return f"the model is in {value}"

    def change(self, question: Question, value: str, exam: Examination) -> None:
        """Choose the dtype."""
        question.dtype = getattr(torch, value)


def _dtypes(exam: Examination) -> list[str]:
    return [str(dtype).removeprefix("torch.") for dtype in HALF_PRECISION if exam.in_dtype(dtype).is_finite]
