"""Half precision: the model in bfloat16 or float16, or under autocast. Only NaN and inf count."""

from __future__ import annotations

from typing import ClassVar

from stackwise.checks.engine.examination import HALF_PRECISION, Examination
from stackwise.checks.engine.question import Precision, Question
from stackwise.checks.engine.variation import Variation


class HalfPrecision(Variation):
    """Ask in half precision. Value: name of the dtype, or "autocast".

    A position, loss or gradient differs if it is not finite, but finite in a plain call in the same dtype.
    """

    name = "half_precision"
    question = "In bfloat16, float16 and autocast, is each result finite if it is finite in a plain call?"
    family = "finiteness"
    rank = 90
    no_values = "needs a model with a finite output in bfloat16, in float16 or under autocast"
    words: ClassVar[dict[str, str]] = {
        "bfloat16": "the model is in bfloat16",
        "float16": "the model is in float16",
        "autocast": "the model runs under autocast to bfloat16",
    }
    compares_less = True
    advice = (
        "Look for masks of finfo.min that are added twice (their sum is -inf), for a softmax with all keys "
        "masked, and for a NaN that is multiplied by 0."
    )

    def values(self, exam: Examination) -> list[str]:
        """Return the precisions with a finite plain answer."""
        return [_name(each) for each in HALF_PRECISION if exam.in_dtype(each).is_finite]

    def change(self, question: Question, value: str, exam: Examination) -> None:
        """Choose the precision."""
        question.dtype = next(each for each in HALF_PRECISION if _name(each) == value)


def _name(precision: Precision) -> str:
    return str(precision).removeprefix("torch.")
