"""Later tokens: inputs after a position, which a causal model must not read there."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace

import torch

from stackwise.checks.engine.examination import Examination
from stackwise.checks.engine.question import Call, Question, Segment
from stackwise.checks.engine.variation import PER_POSITION, Need, Refused, Variation
from stackwise.checks.probe.difference import relative_difference
from stackwise.checks.probe.ties import chooses_among_equals
from stackwise.subject.inference.causality import CALL_READS_AHEAD, READS_AHEAD

_Value = tuple[str, int]


class LaterTokens(Variation):
    """Append tokens to each row, or replace the last tokens of the first one. Value: which, and how many."""

    name = "later_tokens"
    check, family = "causality", "causality"
    question = "Does each output stay the same if later tokens change or are missing?"
    rank = 30
    needs = (
        Need("needs the claim: causal=True", lambda exam: exam.spec.causal is not None),
        Need("the model claims no causality", lambda exam: exam.spec.causal),
        PER_POSITION,
        Need("needs at least 2 positions", lambda exam: exam.longest > 1),
    )
    advice = (
        "Look for a missing or shifted causal mask (tril(diagonal=1)), a mask that padding or eval mode "
        "replaces, view() where transpose() is meant, positions that are counted from the end, and any mean, "
        "norm or convolution over positions."
    )

    def draw(self, exam: Examination, rng: random.Random) -> _Value:
        """Draw a number from 1 to 6."""
        return (rng.choice(("append", "replace")) if len(exam.lengths) > 1 else "replace"), rng.randint(1, 6)

    @torch.no_grad()
    def first_values(self, exam: Examination) -> Iterator[_Value]:
        """Yield the case with the largest difference, and a single token that later tokens follow."""
        length, largest = exam.longest, 0.0
        suspect = None
        sequence, others = exam.sequence(0, length), exam.filler(1, length)[0]
        answer = exam.answer(0, length)
        changed = sequence[None].repeat(length - 1, *(1 for _ in sequence.shape))
        for first in range(1, length):
            changed[first - 1, first:] = exam.unlike(sequence, others)[first:]
        with exam.subject.fixed_randomness(), exam.precision():
            outputs = exam.spec.logits(exam.model(), changed)
        for first in range(1, length):
            gap = float(relative_difference(answer[:first], outputs[first - 1, :first]).max())
            if not gap <= max(largest, exam.limit):
                largest, suspect = gap, ("replace", length - first)
        if suspect is not None:
            yield suspect
        if exam.shortest == 1:
            yield "append", length - 1

    def simpler(self, value: _Value) -> Iterator[_Value]:
        """Yield one token."""
        if value[1] > 1:
            yield value[0], 1

    def text(self, value: _Value) -> str:
        """Return the number of tokens."""
        how, count = value
        if how == "replace":
            return "the last token is replaced" if count == 1 else f"the last {count} tokens are replaced"
        return f"{count} later token{'s follow' if count > 1 else ' follows'}"

    def correct_if(self, exam: Examination, value: _Value) -> str | None:
        """Return a condition if the model may be an encoder, or if a top k selects among equal scores."""
        if READS_AHEAD in exam.spec.notes:
            return "the model is an encoder (then declare causal=False)"
        if CALL_READS_AHEAD in exam.spec.notes:
            return "some positions see later ones, such as those of an image (then declare visible=)"
        inputs = exam.sequence(0, exam.longest)[None]
        if chooses_among_equals(lambda: exam.subject.logits(exam.model(), inputs)):
            return "only the order of equal scores changes: a top-k of this model chooses among equal scores"
        return None

    def advice_for(self, exam: Examination) -> str:
        """Add how to declare an encoder, if causality was assumed."""
        if "causal" not in exam.spec.assumed:
            return self.advice
        return (
            f"{self.advice} Causality was assumed: for an encoder, declare causal=False (stackwise check "
            "--no-causal)."
        )

    def change(self, question: Question, value: _Value, exam: Examination) -> None:
        """Append the tokens, after shortening the rows so that they fit."""
        how, count = value
        if how == "replace":
            question.gradients = False  # replaced inputs have other gradients
            return
        room = exam.longest - count
        if room < exam.shortest or any(len(row) > 1 for row in question.rows):
            raise Refused("there is no room for later tokens")
        question.rows = [
            [replace(row[0], length=min(row[0].length, room)), Segment("later", count)]
            for row in question.rows
        ]

    def edit(self, call: Call, value: _Value, exam: Examination) -> None:
        """Replace the last tokens, and compare the outputs before them."""
        how, count = value
        if how != "replace":
            return
        if call.labels is not None:
            raise Refused("labels are the tokens")
        place = call.places[0]
        length = place.end - place.start
        first = max(1, length - count)
        if first == length:
            raise Refused("there is no output before a later token")
        row = call.inputs[place.row, place.start + first : place.end]
        row[:] = exam.unlike(row, exam.filler(1, length)[0][first:])
        call.compare_only(place, torch.arange(length) < first)
