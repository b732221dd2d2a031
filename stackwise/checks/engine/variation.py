"""Variation: one way to change a question without a change of its answer."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from torch import Tensor, nn

from stackwise.checks.engine.question import Call, Question

if TYPE_CHECKING:
    from stackwise.checks.engine.examination import Examination

__all__ = [
    "DECODE",
    "MASKED",
    "PADDING_SIDES",
    "PER_POSITION",
    "POSITIONS",
    "TRAIN_MODE",
    "Need",
    "Refused",
    "Suite",
    "Switch",
    "Variation",
]

Suite = Literal["fast", "full"]


class Refused(Exception):  # noqa: N818  not for users
    """The model, or a rule of a variation, does not allow a composition. The text says why."""


@dataclass(frozen=True)
class Need:
    """Condition on the model.

    Attributes:
        reason: why the variation does not apply to other models.
        holds: returns a true value if a model meets the condition.
    """

    reason: str
    holds: Callable[[Examination], object]


MASKED = Need(
    "needs masked: (model, inputs, keep) -> output, of a batch with padding",
    lambda exam: exam.spec.masked is not None,
)
PADDING_SIDES = Need(
    "needs padding_sides: the model claims no side on which padding may be",
    lambda exam: exam.spec.padding_sides,
)
PER_POSITION = Need("needs an output per position", lambda exam: exam.spec.per_position)
DECODE = Need(
    "needs a causal model with decode", lambda exam: exam.spec.decode is not None and exam.spec.causal
)
POSITIONS = Need(
    "needs a parameter position_ids that forward= does not pass", lambda exam: exam.takes_positions
)
TRAIN_MODE = Need(
    "needs a train mode that is random only by dropout, and without batch statistics",
    lambda exam: exam.has_train_mode,
)


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
        needs: conditions on the model, the first of which that does not hold is reported.
        choices: values to draw from, if they are the same for all models.
        no_values: why the variation does not apply to a model that takes no value.
        simplest: value that is tried in place of each other one. None: there is none.
        words: the variation in words, as the end of "The output changes if ...". {} is the value. Otherwise a
            table of values.
        sets: attributes of the question, with their new values.
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
    needs: ClassVar[tuple[Need, ...]] = ()
    choices: ClassVar[Sequence[Any]] = ()
    no_values: ClassVar[str] = ""
    simplest: ClassVar[Any] = None
    words: ClassVar[str | Mapping[str, str]]
    sets: ClassVar[Mapping[str, bool]] = {}

    def missing(self, exam: Examination) -> str:
        """Return why the variation does not apply to a model, or ""."""
        reason = next((need.reason for need in self.needs if not need.holds(exam)), "")
        return reason or ("" if self.values(exam) else self.no_values)

    def values(self, exam: Examination) -> Sequence[Any]:
        """Return the values that the model accepts, to draw one of them."""
        return self.choices

    def draw(self, exam: Examination, rng: random.Random) -> Any:
        """Return a random value."""
        return rng.choice(self.values(exam))

    def first_values(self, exam: Examination) -> Iterator[Any]:
        """Yield values that are always executed: usual ones, and those that a quick test suspects."""
        yield from ()

    def simpler(self, value: Any) -> Iterator[Any]:
        """Yield values that are simpler than `value`, the simplest first."""
        if self.simplest is not None and value != self.simplest:
            yield self.simplest

    def text(self, value: Any) -> str:
        """Return the variation in words."""
        return self.words.format(value) if isinstance(self.words, str) else self.words[value]

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
        for name, new in self.sets.items():
            setattr(question, name, new)

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
    """Variation that is either applied or not, without other values."""

    choices = (True,)
