"""Variation: one way to change a question without a change of its answer."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from torch import Tensor, nn

from stackwise.checks.engine.question import Call, Question

if TYPE_CHECKING:
    from stackwise.checks.engine.examination import Examination

__all__ = ["Refused", "Suite", "Switch", "Variation"]

Suite = Literal["fast", "full"]


class Refused(Exception):  # noqa: N818  not for users
    """The model, or a rule of a variation, does not allow a composition. The text says why."""


class Variation:
    """Way to change a question without a change of its answer.

    A variation has a value that JSON can express: sizes of parts, a side, a number. For each composition, the
    engine calls draw, change, edit, prepare, around, arguments and restore, in this order. The other methods
    describe and simplify a difference. Most methods have a default that changes nothing.

    Attributes:
        name: name in compositions.
        check: name of the check that reports its findings. None: the name of the variation.
        family: family of this check.
        question: question of this check.
        suite: "fast", or "full" for a variation that is too slow for the fast suite. No other check runs it.
        rank: a finding of several variations is reported by the one with the highest rank. Variations with
            a lower rank change the question first. A new variation gets the rank of the most similar one
            plus 1. Equal ranks are allowed.
        excludes: names of variations that cannot be combined with this one.
        includes: names of variations that this one contains.
        explained_by: names of variations whose findings also explain those of this one.
        single_checks: names of checks that ask for this variation alone. If one of them fails, it reports the
            difference, because it describes it better.
        compares_less: True if it compares only NaN and infinity. Sets for other pairs do not contain it.
        advice: common causes of a difference.
    """

    name: ClassVar[str]
    check: ClassVar[str | None] = None
    family: ClassVar[str] = "equivalence"
    question: ClassVar[str]
    suite: ClassVar[Suite] = "fast"
    rank: ClassVar[int]
    excludes: ClassVar[frozenset[str]] = frozenset()
    includes: ClassVar[frozenset[str]] = frozenset()
    explained_by: ClassVar[frozenset[str]] = frozenset()
    single_checks: ClassVar[tuple[str, ...]] = ()
    compares_less: ClassVar[bool] = False
    advice: ClassVar[str]

    def missing(self, exam: Examination) -> str:
        """Return why the variation does not apply to a model, or ""."""
        return ""

    def draw(self, exam: Examination, rng: random.Random) -> Any:
        """Return a random value."""
        raise NotImplementedError

    def suspects(self, exam: Examination) -> Iterator[Any]:
        """Yield values that a quick test finds suspicious. They are executed first."""
        yield from ()

    def simpler(self, value: Any) -> Iterator[Any]:
        """Yield values that are simpler than `value`, the simplest first."""
        yield from ()

    def text(self, value: Any) -> str:
        """Return the variation in words, as the end of "The output changes if ..."."""
        raise NotImplementedError

    def correct_if(self, exam: Examination, value: Any) -> str | None:
        """Return the condition under which a difference is correct (a WARN), or None (a FAIL)."""
        return None

    def advice_for(self, exam: Examination) -> str:
        """Return common causes of a difference for a model."""
        return self.advice

    def change(self, question: Question, value: Any, exam: Examination) -> None:
        """Change the layout or the arguments of a question.

        Raises:
            Refused: this question cannot be changed so.
        """

    def edit(self, call: Call, value: Any, exam: Examination) -> None:
        """Change the tensors of a call, such as `call.inputs`.

        The model gets a contiguous copy of the inputs, so other strides have no effect.
        """

    def prepare(self, model: nn.Module, value: Any, exam: Examination) -> nn.Module:
        """Return the model to ask, which is `model` or a copy, in eval mode."""
        return model

    def around(self, value: Any) -> AbstractContextManager[object]:
        """Return the context of the call."""
        return nullcontext()

    def arguments(self, call: Call, model: nn.Module, value: Any, exam: Examination) -> dict[str, Any]:
        """Return further keyword arguments of the call."""
        return {}

    def restore(self, output: Tensor, call: Call, value: Any) -> Tensor:
        """Return the logits (B, W, V) of a call, if the model returned them in another form."""
        return output


class Switch(Variation):
    """Variation that is either applied or not, without other values.

    Attributes:
        words: the variation in words, as in `text`.
    """

    words: ClassVar[str]

    def draw(self, exam: Examination, rng: random.Random) -> bool:
        """Return True."""
        return True

    def text(self, value: Any) -> str:
        """Return `words`."""
        return self.words
