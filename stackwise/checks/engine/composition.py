"""Composition: a set of variations with their values, its plan and its execution."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from itertools import combinations
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from stackwise.checks.engine.call import execute, loss_of
from stackwise.checks.engine.examination import (
    LOSS_LIMIT,
    Examination,
    Gradients,
    gradients_in,
    largest_gap,
    projection,
    stream,
)
from stackwise.checks.engine.question import Call, Place, Question, Segment
from stackwise.checks.engine.variation import Refused, Variation
from stackwise.checks.probe.difference import relative_difference
from stackwise.checks.probe.dropout import WithoutDropout
from stackwise.subject.inference import logits_of

__all__ = [
    "NEXT_CALL",
    "WITHOUT_ANY_LABEL",
    "WITHOUT_LABEL",
    "Composition",
    "Difference",
    "Execution",
    "Plan",
    "differences",
    "plans",
]

Variations = Mapping[str, Variation]
NEXT_CALL = "output of the next call"
WITHOUT_ANY_LABEL = "gradient without labels"
WITHOUT_LABEL = "gradient of an output without a label"
# Share of the compositions whose gradients are compared.
_WITH_GRADIENTS = 0.3
# Values of each variation that are asked alone.
_DRAWS_ALONE = 3
# Chance of each variation to be part of a random composition.
_CHANCE = 0.3


@dataclass(frozen=True)
class Composition:
    """Set of variations with their values.

    Attributes:
        values: value of each variation, by its name.
        length: number of positions of the first sequence.
        gradients: True if the gradients are compared.
        after: True if a plain call of the same model follows, which must give the plain answer.
    """

    values: Mapping[str, Any]
    length: int
    gradients: bool = False
    after: bool = True

    @property
    def names(self) -> frozenset[str]:
        """Return the names of the variations."""
        return frozenset(self.values)

    def without(self, name: str) -> Composition:
        """Return the composition without a variation."""
        return replace(self, values={each: value for each, value in self.values.items() if each != name})

    def simpler(self, variations: Variations, exam: Examination) -> Iterator[Composition]:
        """Yield simpler compositions: without a variation, with a simpler value, with a shorter sequence."""
        for name in sorted(self.values, key=lambda each: -variations[each].rank):
            if len(self.values) > 1:
                yield self.without(name)
        if self.gradients:
            yield replace(self, gradients=False)
        if self.after:
            yield replace(self, after=False)
        for name, value in self.values.items():
            for simpler in variations[name].simpler(value):
                yield replace(self, values={**self.values, name: simpler})
        for length in (exam.lengths[0], self.length // 2, self.length - 1):
            if length in exam.lengths and length < self.length:
                yield replace(self, length=length)

    def text(self, variations: Variations) -> str:
        """Return the variations in words, as the end of "The output changes if ..."."""
        ordered = sorted(self.values, key=lambda name: -variations[name].rank)
        return " and ".join(variations[name].text(self.values[name]) for name in ordered)


@dataclass(frozen=True)
class Difference:
    """Largest difference between a composition and its answers.

    Attributes:
        observable: "output", "loss", "gradient", NEXT_CALL, WITHOUT_LABEL or WITHOUT_ANY_LABEL.
        value: relative difference.
        limit: largest difference that is rounding.
        place: position or parameter with the largest difference.
    """

    observable: str
    value: float
    limit: float
    place: str = ""

    @property
    def is_real(self) -> bool:
        """Return True if it is more than rounding. NaN is."""
        return not self.value <= self.limit


@dataclass(frozen=True)
class Plan:
    """Set of variations to compose, without their values.

    Attributes:
        names: names of the variations.
        label: seed of the values. Each variation draws from a random stream of its own.
    """

    names: tuple[str, ...]
    label: str

    def draw(self, variations: Variations, exam: Examination, attempt: int) -> Composition:
        """Return a composition with random values. Each attempt gives other values."""
        seed = exam.subject.seed
        ordered = sorted(self.names, key=lambda name: variations[name].rank)
        words = (seed, self.label, attempt)
        values = {name: variations[name].draw(exam, stream(name, *words)) for name in ordered}
        # The longer of two, because more can go wrong in a long sequence.
        length = max(stream("length", number, *words).choice(exam.lengths) for number in range(2))
        gradients = bool(values) and stream("gradients", *words).random() < _WITH_GRADIENTS
        return Composition(values, length, gradients)


def plans(names: list[str], variations: Variations, seed: int, count: int) -> Iterator[Plan]:
    """Yield a plain call, each variation alone, each pair that can be combined, then random sets.

    A variation is asked alone with several values. A new variation leaves the plans of the others unchanged,
    apart from random sets that contain it.
    """
    yield Plan((), "plain")
    alone = [Plan((name,), f"{name} {number}") for name in names for number in range(_DRAWS_ALONE)]
    pairs = [
        Plan(pair, " ".join(sorted(pair))) for pair in combinations(names, 2) if _compatible(pair, variations)
    ]
    yield from (*alone, *pairs)
    for number in range(max(0, count - len(alone) - len(pairs))):
        chosen = [name for name in names if stream(seed, number, name, "chosen").random() < _CHANCE]
        chosen.sort(key=lambda name: stream(seed, number, name, "order").random())
        group: tuple[str, ...] = ()
        for name in chosen:
            if _compatible((*group, name), variations):
                group = (*group, name)
        yield Plan(group, f"random {number}")


def _compatible(names: tuple[str, ...], variations: Variations) -> bool:
    return not any(
        b in variations[a].excludes or a in variations[b].excludes for a, b in combinations(names, 2)
    )


def differences(composition: Composition, variations: Variations, exam: Examination) -> list[Difference]:
    """Execute a composition and compare it with the plain answers.

    Raises:
        Refused: a variation does not allow it.
        Exception: the model does not take it.
    """
    execution = Execution(composition, variations, exam)
    found = list(execution.compare())
    if composition.after and not execution.question.train:
        found.append(execution.next_call())
    return found


class Execution:
    """One execution of a composition on a new copy of the model.

    Attributes:
        question: the question, after all variations.
        call: its tensors.
        model: the model that is asked.
    """

    def __init__(self, composition: Composition, variations: Variations, exam: Examination) -> None:
        self.exam, self._composition = exam, composition
        self._variations = [
            (variations[name], value)
            for name, value in sorted(composition.values.items(), key=lambda item: variations[item[0]].rank)
        ]
        self.question = Question([[Segment("sequence", composition.length)]], gradients=composition.gradients)
        for variation, value in self._variations:
            variation.change(self.question, value, exam)
        self.question.cut_to_shortest()
        if self.question.gradients and not self.question.train:
            self.question.train = exam.gradients_in_train_mode
        self.call, self._numbers = _arranged(self.question, exam)
        for variation, value in self._variations:
            variation.edit(self.call, value, exam)
        model = exam.model()
        for variation, value in self._variations:
            model = variation.prepare(model, value, exam)
        self.model = model.train(self.question.train)

    def compare(self) -> Iterator[Difference]:
        """Execute the call, and yield the difference of each observable."""
        question, exam = self.question, self.exam
        with ExitStack() as around:
            if question.train:
                around.enter_context(WithoutDropout())
            for variation, value in self._variations:
                around.enter_context(variation.around(value))
                self.call.arguments |= variation.arguments(self.call, self.model, value, exam)
            around.enter_context(exam.subject.fixed_randomness())
            around.enter_context(torch.set_grad_enabled(question.gradients))
            if question.ignored is not None:
                yield from self._of_loss()
                return
            output = execute(exam.spec, self.model, self.call)
            for variation, value in self._variations:
                output = variation.restore(output, self.call, value)
            rows = [self._row(output, place) for place in self.call.places]
            if self._compares_gradients and output.requires_grad:
                total = sum((row * projection(row, number)).sum() for row, (number, _) in self._rows(rows))
                assert isinstance(total, Tensor)
                total.backward()  # type: ignore[no-untyped-call]
        yield self._of_outputs([row.detach() for row in rows])
        if self._compares_gradients and output.requires_grad:
            each = [exam.answer_gradients(*key) for key in self._numbers]
            yield self._of_gradients(_summed(each), gradients_in(self.model))

    @property
    def _compares_gradients(self) -> bool:
        """Return True if the gradients are taken in the mode of the expected ones."""
        return self.question.gradients and self.question.train == self.exam.gradients_in_train_mode

    @torch.no_grad()
    def next_call(self) -> Difference:
        """Ask the same model a plain question afterwards: a call may not leave traces."""
        exam, key = self.exam, (90, self.exam.lengths[len(self.exam.lengths) // 2])
        output = exam._plain(self.model.eval(), exam.sequence(*key))
        return Difference(NEXT_CALL, _gap(exam.answer(*key), output), exam.limit)

    def _rows(self, rows: list[Tensor]) -> Iterator[tuple[Tensor, tuple[int, int]]]:
        return zip(rows, self._numbers, strict=True)

    def _row(self, output: Tensor, place: Place) -> Tensor:
        if not self.exam.spec.per_position:
            return output[place.row : place.row + 1].flatten(1)
        return output[place.row, place.start : place.end]

    def _of_outputs(self, rows: list[Tensor]) -> Difference:
        worst, where = 0.0, ""
        for number, (row, key, place) in enumerate(zip(rows, self._numbers, self.call.places, strict=True)):
            answer = self.exam.answer(*key)
            if row.shape != answer.shape:
                raise Refused(f"an output of shape {tuple(row.shape)} in place of {tuple(answer.shape)}")
            gaps = relative_difference(answer, row).amax(dim=-1)
            if number in self.call.compared:
                gaps = gaps.where(self.call.compared[number], 0.0)
            if not float(gaps.max()) <= worst:
                worst, position = float(gaps.max()), int(gaps.argmax())
                where = f"row {place.row}, position {place.start + position}"
        return Difference("output", worst, self.exam.limit, where)

    def _of_gradients(self, expected: Gradients, found: Gradients) -> Difference:
        value, where = largest_gap(expected, found, self.exam.gradient_floor)
        return Difference("gradient", value, self.exam.gradient_limit, where)

    def _of_loss(self) -> Iterator[Difference]:
        """Compare the own loss, its gradients, and the outputs that it trains."""
        outputs: list[Any] = []
        handle = self.model.register_forward_hook(lambda *call: outputs.append(call[-1]))
        try:
            loss = loss_of(self.exam.spec, self.model, self.call)
        finally:
            handle.remove()
        logits = _logits_in_graph(outputs, self.call)
        if self.question.gradients and loss.requires_grad:
            if logits is not None:
                logits.retain_grad()
            loss.backward()  # type: ignore[no-untyped-call]
        found = gradients_in(self.model)
        expected, gradients, count = self._expected_loss()
        if logits is not None and logits.grad is not None:
            yield from self._of_targets(logits.grad)
        if not count and self.exam.loss_shift is None:
            return  # a loss with other terms has a gradient without labels
        if not count:
            # A mean over no labels is NaN in torch; the check empty_loss reports it.
            largest = max((float(g.nan_to_num().abs().max()) for g in found.values()), default=0.0)
            yield Difference(WITHOUT_ANY_LABEL, largest, 0.0)
            return
        gap = abs(float(loss.detach()) - float(expected)) / max(abs(float(expected)), 1e-9)
        yield Difference("loss", gap, max(LOSS_LIMIT, self.exam.limit))
        if self._compares_gradients:
            yield self._of_gradients(gradients, found)

    def _expected_loss(self) -> tuple[Tensor, Gradients, int]:
        """Return the expected loss, its gradients and the number of labels.

        They are those of the mean negative log likelihood, if this is the formula of the own loss. Otherwise
        they are those of the own loss of a new model, with the same labels and no further arguments.
        """
        labels = self.call.labels
        assert labels is not None
        each = [
            (*key, labels[place.row, place.start : place.end])
            for key, place in zip(self._numbers, self.call.places, strict=True)
        ]
        shift = self.exam.loss_shift
        expected = self.exam.reference_loss(
            each, int(bool(self.exam.spec.causal)) if shift is None else shift
        )
        if shift is not None or not expected[2]:
            return expected
        if any(len(row) > 1 for row in self.question.rows):
            raise Refused("the own loss is no mean negative log likelihood, so its value is not known")
        model = self.exam.model().train(self.question.train)
        with torch.enable_grad():
            loss = loss_of(self.exam.spec, model, Call(self.call.inputs, [], [], labels=labels))
            loss.backward()  # type: ignore[no-untyped-call]
        return loss.detach(), gradients_in(model), expected[2]

    def _of_targets(self, gradient: Tensor) -> Iterator[Difference]:
        """Yield outputs that have no label and are trained to predict a token nevertheless.

        The gradient of a cross-entropy has one negative entry, that of the target, and sum 0. Other terms of
        a loss, such as a z-loss, may reach every output.
        """
        labels = self.call.labels
        assert labels is not None
        sizes = gradient.abs().amax(dim=-1)
        sums = gradient.double().sum(dim=-1).abs()
        is_target = ((gradient < 0).sum(dim=-1) == 1) & (sums < 1e-3 * sizes)
        targets = gradient.argmin(dim=-1)
        shifted = F.pad(labels[:, 1:], (0, 1), value=-100)
        # Of the two conventions, take the one that the targets follow.
        hits = [int((is_target & (targets == each)).sum()) for each in (shifted, labels)]
        if not max(hits):
            return
        own = shifted if hits[0] >= hits[1] else labels
        extra = (is_target & (own == -100)).nonzero().tolist()
        for row, position in extra[:1]:
            place = f"row {row}, position {position}: target {int(targets[row, position])}"
            yield Difference(WITHOUT_LABEL, float(sizes[row, position]), 0.0, place)


def _logits_in_graph(outputs: list[Any], call: Call) -> Tensor | None:
    """Return the logits of the last output, if the loss may have been computed from them."""
    try:
        logits = logits_of(outputs[-1])
    except (TypeError, IndexError):
        return None
    fits = logits.requires_grad and logits.ndim == 3 and logits.shape[:2] == call.inputs.shape[:2]
    return logits if fits else None


def _arranged(question: Question, exam: Examination) -> tuple[Call, list[tuple[int, int]]]:
    """Return the tensors of a question, and the number and length of each sequence."""
    numbers: list[tuple[int, int]] = []
    places: list[Place] = []
    sequences: list[Tensor] = []
    rows: list[Tensor] = []
    keeps: list[Tensor] = []
    documents: list[Tensor] = []
    filler = None
    if any(segment.kind != "sequence" for row in question.rows for segment in row):
        filler = exam.filler(len(question.rows), question.width)
    for index, row in enumerate(question.rows):
        parts: list[Tensor] = []
        keep: list[bool] = []
        document: list[int] = []
        start = 0
        for segment in row:
            end = start + segment.length
            if segment.kind == "sequence":
                key = (len(numbers), segment.length)
                numbers.append(key)
                places.append(Place(index, start, end))
                sequences.append(exam.sequence(*key))
                parts.append(sequences[-1])
            else:
                assert filler is not None
                parts.append(filler[index, start:end])
            keep += [segment.kind != "padding"] * segment.length
            is_first = segment.kind == "sequence" and start > 0
            document += [(document[-1] if document else 0) + is_first] * segment.length
            start = end
        rows.append(parts[0] if len(parts) == 1 else torch.cat(parts))
        keeps.append(torch.tensor(keep))
        documents.append(torch.tensor(document))
    device = exam.subject.device
    call = Call(torch.stack(rows).to(device), sequences, places)
    if question.mask:
        call.keep = torch.stack(keeps).to(device)
    if question.documents:
        call.documents = torch.stack(documents).to(device)
    if question.parts:
        call.parts = _filled(question.parts, question.width)
    if question.ignored is not None:
        call.labels = _labels(call, question.ignored, exam)
    return call, numbers


def _filled(sizes: tuple[int, ...], width: int) -> tuple[int, ...]:
    """Return sizes that add up to `width`. The last size repeats."""
    parts: list[int] = []
    left = width
    while left > 0:
        size = min(left, sizes[min(len(parts), len(sizes) - 1)])
        parts.append(size)
        left -= size
    return tuple(parts)


def _labels(call: Call, ignored: float, exam: Examination) -> Tensor:
    """Return the ids of the sequences as labels, a share of them ignored.

    The first label of a sequence is ignored: the output before it belongs to padding or another sequence.
    """
    labels = torch.full_like(call.inputs, -100)
    for number, place in enumerate(call.places):
        some = call.sequences[number].clone()
        rng = torch.Generator().manual_seed(exam.subject.seed + number)
        some[torch.rand(len(some), generator=rng) < ignored] = -100
        some[0] = -100
        labels[place.row, place.start : place.end] = some
    return labels


def _summed(gradients: list[Gradients]) -> Gradients:
    total: dict[str, Tensor] = {}
    for each in gradients:
        for name, gradient in each.items():
            total[name] = total[name] + gradient if name in total else gradient
    return total


def _gap(a: Tensor, b: Tensor) -> float:
    return float(relative_difference(a, b).max()) if a.shape == b.shape else float("inf")
