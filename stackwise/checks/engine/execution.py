"""Execution: ask a composition, compare each observable with the plain answers, and locate a difference."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from stackwise.checks.engine.call import execute, loss_of
from stackwise.checks.engine.composition import Composition
from stackwise.checks.engine.examination import (
    LOSS_LIMIT,
    NARROW_FLOOR,
    NARROW_GRADIENT_LIMIT,
    NARROW_LIMIT,
    Examination,
    Gradients,
    gradients_in,
    largest_gap,
    projection,
)
from stackwise.checks.engine.question import Call, Place, Question, Segment
from stackwise.checks.engine.variation import Refused
from stackwise.checks.probe.batch import tensors_in
from stackwise.checks.probe.call import reason_of
from stackwise.checks.probe.difference import relative_difference
from stackwise.checks.probe.dropout import WithoutDropout
from stackwise.checks.probe.side_effects import SideEffects, same_generators, watched_call
from stackwise.subject.inference import logits_of
from stackwise.support.global_settings import restore_settings
from stackwise.support.hooks import temporary_hooks
from stackwise.support.random_state import seeded
from stackwise.support.system_errors import reraise_if_out_of_memory

__all__ = [
    "NEXT_CALL",
    "SIDE_EFFECT",
    "WITHOUT_ANY_LABEL",
    "WITHOUT_LABEL",
    "Difference",
    "Execution",
    "differences",
    "first_difference",
]

NEXT_CALL = "output of the next call"
SIDE_EFFECT = "side effect"
WITHOUT_ANY_LABEL = "gradient without labels"
WITHOUT_LABEL = "gradient of an output without a label"
# Seed of the generators before a call. It is unusual, so that a model does not set the same seed.
_SEED = 1_000_003


@dataclass(frozen=True)
class Difference:
    """Largest difference between a composition and its answers.

    Attributes:
        observable: "output", "loss", "gradient", NEXT_CALL, WITHOUT_LABEL, WITHOUT_ANY_LABEL or SIDE_EFFECT.
        value: relative difference. For gradients without labels: the size of the gradient. For half
            precision: inf if a value is not finite.
        limit: largest difference that is treated as rounding.
        place: position or parameter with the largest difference. For a side effect: the change in words.
        correct_if: condition under which a side effect is correct. None: it never is.
    """

    observable: str
    value: float
    limit: float
    place: str = ""
    correct_if: str | None = None

    @property
    def is_real(self) -> bool:
        """Return True if it is more than rounding. NaN is."""
        return not self.value <= self.limit


def differences(composition: Composition, exam: Examination) -> list[Difference]:
    """Execute a composition and compare it with the plain answers.

    Raises:
        Refused: a variation does not allow it.
        Exception: the model does not take it.
    """
    execution = Execution(composition, exam)
    found = list(execution.compare())
    if composition.after and not execution.question.train and execution.exam.compares_values:
        found.append(execution.next_call())
    effects, others = execution.effects, SideEffects()
    if effects.found or effects.moved:  # repeat: an import inside a call may change a setting only once
        again = Execution(composition, exam, start=2)
        list(again.compare())
        others = again.effects
    real = [each for each in effects.found if each in others.found] + same_generators(effects, others)
    return found + [Difference(SIDE_EFFECT, 1.0, 0.0, each.text, each.correct_if) for each in real]


class Execution:
    """One execution of a composition on a new copy of the model.

    Attributes:
        question: the question, after all variations.
        call: tensors of the call.
        model: the model that is called.
        effects: side effects of the call, after `compare`.
    """

    def __init__(self, composition: Composition, exam: Examination, *, start: int = 1) -> None:
        self.exam, self._start = exam, start
        self.effects = SideEffects()
        self._variations = composition.variations
        self.question = Question([[Segment("sequence", composition.length)]], gradients=composition.gradients)
        for variation, value in self._variations:
            variation.change(self.question, value, exam)
        self.question.cut_to_shortest()
        if self.question.dtype is not None:
            self.exam = exam = exam.in_dtype(self.question.dtype)
        if self.question.gradients and not self.question.train:
            self.question.train = exam.gradients_in_train_mode
        self.call = _arranged(self.question, exam)
        for variation, value in self._variations:
            variation.edit(self.call, value, exam)
        model = exam.model()
        for variation, value in self._variations:
            model = variation.prepare(model, value, exam)
        self.model = model.train(self.question.train)

    def compare(self) -> Iterator[Difference]:
        """Execute the call, and yield the difference of each observable."""
        question, exam, call = self.question, self.exam, self.call
        restore_settings(exam.settings)
        given = {"inputs": call.inputs, "mask": call.keep, "documents": call.documents, "labels": call.labels}
        with ExitStack() as around:
            if question.train:
                around.enter_context(WithoutDropout())
            for variation, value in self._variations:
                around.enter_context(variation.around(value))
                call.arguments |= variation.arguments(call, self.model, value, exam)
            around.enter_context(seeded(exam.subject.seed + _SEED * self._start, exam.subject.device))
            around.enter_context(exam.precision())
            around.enter_context(torch.set_grad_enabled(question.gradients))
            self.effects = around.enter_context(watched_call(self.model, given, decodes=bool(call.parts)))
            if call.labels is not None:
                yield from self._of_loss(call.labels)
                return
            output = execute(exam.spec, self.model, call)
            for variation, value in self._variations:
                output = variation.restore(output, call, value)
            if self._compares_gradients and output.requires_grad:
                rows = ((exam.row(output, place), place.number) for place in call.places)
                total = torch.stack([(row * projection(row, number)).sum() for row, number in rows]).sum()
                total.backward()  # type: ignore[no-untyped-call]
        yield self._of_outputs(output.detach())
        if self._compares_gradients and output.requires_grad:
            each = [exam.answer_gradients(*place.sequence) for place in call.places]
            yield self._of_gradients(_summed(each), gradients_in(self.model))

    @property
    def _compares_gradients(self) -> bool:
        """Return True if the gradients are those of all outputs, in the mode of the expected ones."""
        same_mode = self.question.train == self.exam.gradients_in_train_mode
        comparable = same_mode and self.exam.has_gradients and self.call.compared is None
        return self.question.gradients and comparable

    @torch.no_grad()
    def next_call(self) -> Difference:
        """Ask the same model a plain question afterwards: a call must not change the next one."""
        exam, key = self.exam, (90, self.exam.lengths[len(self.exam.lengths) // 2])
        answer = exam.answer(*key)
        try:
            output = exam.plain(self.model.eval(), exam.sequence(*key))
        except Exception as error:  # a new model takes this call
            reraise_if_out_of_memory(error)
            return Difference(NEXT_CALL, math.inf, self._limit, reason_of(error))
        has_shape = output.shape == answer.shape
        gap = float(relative_difference(answer, output).max()) if has_shape else math.inf
        return Difference(NEXT_CALL, gap, self._limit)

    @property
    def _limit(self) -> float:
        """Return the largest difference of most outputs that is rounding."""
        return max(self.exam.limit, NARROW_LIMIT if self.question.computes_in_float32 else 0.0)

    def _of_outputs(self, output: Tensor) -> Difference:
        usual = limit = self._limit
        worst, where = 0.0, ""
        for place in self.call.places:
            answer, row = self.exam.answer(*place.sequence), self.exam.row(output, place)
            if row.shape != answer.shape:
                raise Refused(f"an output of shape {tuple(row.shape)} in place of {tuple(answer.shape)}")
            gaps = self.gaps(place, answer, row)
            value = float(gaps.max())
            allowed = usual if value <= usual else max(usual, self.exam.limit_of(*place.sequence))
            if not value / allowed <= worst / limit:
                worst, limit, position = value, allowed, int(gaps.argmax())
                where = f"row {place.row}, position {place.start + position}"
        return Difference("output", worst, limit, where)

    def gaps(self, place: Place, expected: Tensor, found: Tensor) -> Tensor:
        """Return the difference of two tensors (T, ...) of a sequence at each position (T,)."""
        if self.exam.compares_values:
            gaps = relative_difference(expected, found)
        else:
            gaps = torch.where(expected.isfinite() & ~found.isfinite(), torch.inf, 0.0)
        gaps = gaps.flatten(1).amax(dim=1)
        if self.call.compared is None:
            return gaps
        return gaps.where(self.call.compared[place.row, place.start : place.end], 0.0)

    def _of_gradients(self, expected: Gradients, found: Gradients) -> Difference:
        if not self.exam.compares_values:
            finite = [name for name, gradient in expected.items() if gradient.isfinite().all()]
            bad = [name for name in finite if name in found and not found[name].isfinite().all()]
            return Difference("gradient", math.inf if bad else 0.0, 0.0, bad[0] if bad else "")
        floor, limit = self.exam.gradient_floor, self.exam.gradient_limit
        if self.question.computes_in_float32:
            floor, limit = max(floor, NARROW_FLOOR), max(limit, NARROW_GRADIENT_LIMIT)
        value, where = largest_gap(expected, found, floor)
        return Difference("gradient", value, limit, where)

    def _of_loss(self, labels: Tensor) -> Iterator[Difference]:
        """Compare the own loss, its gradients, and the outputs that it trains."""
        outputs: list[Any] = []
        call = replace(self.call, labels=labels.clone())  # a copy: the originals are compared later
        with self.model.register_forward_hook(lambda *call: outputs.append(call[-1])):
            loss = loss_of(self.exam.spec, self.model, call)
        logits = _logits_in_graph(outputs, call)
        if self.question.gradients and loss.requires_grad:
            if logits is not None:
                logits.retain_grad()
            loss.backward()  # type: ignore[no-untyped-call]
        found = gradients_in(self.model)
        expected, gradients, count = self._expected_loss(labels)
        if logits is not None and logits.grad is not None:
            yield from self._of_targets(logits.grad, labels)
        if not count:
            yield from self._without_labels(found)
        elif not self.exam.compares_values:
            is_bad = bool(expected.isfinite()) and not loss.isfinite()
            yield Difference("loss", math.inf if is_bad else 0.0, 0.0)
        elif expected.isfinite():  # it is not for heads for later tokens, in a sequence that has none
            gap = abs(float(loss.detach()) - float(expected)) / max(abs(float(expected)), 1e-9)
            yield Difference("loss", gap, max(LOSS_LIMIT, self.exam.limit))
            if self._compares_gradients:
                yield self._of_gradients(gradients, found)

    def _without_labels(self, found: Gradients) -> Iterator[Difference]:
        """Yield the size of the gradients of a loss without labels, unless other terms have a gradient."""
        has_others = self.model.training and self.exam.adds_gradients
        if self.exam.loss_shift is not None and not has_others:
            # A mean over no labels is NaN in torch; the check empty_loss reports it.
            largest = max((float(g.nan_to_num().abs().max()) for g in found.values()), default=0.0)
            yield Difference(WITHOUT_ANY_LABEL, largest, 0.0)

    def _expected_loss(self, labels: Tensor) -> tuple[Tensor, Gradients, int]:
        """Return the expected loss, its gradients and the number of labels.

        They are those of the mean negative log likelihood, if this is the formula of the own loss. Otherwise
        they are those of the own loss of a new model, with the same labels and no further arguments.
        """
        exam, shift = self.exam, self.exam.loss_shift
        each = [(*place.sequence, labels[place.row, place.start : place.end]) for place in self.call.places]
        expected = exam.reference_loss(each, int(bool(exam.spec.causal)) if shift is None else shift)
        if shift is not None or not expected[2]:
            return expected
        if any([segment.kind for segment in row] != ["sequence"] for row in self.question.rows):
            raise Refused("the own loss is no mean negative log likelihood, so its value is not known")
        model = exam.model().train(self.question.train)
        with torch.enable_grad():
            loss = loss_of(exam.spec, model, Call(self.call.inputs, labels=labels))
            loss.backward()  # type: ignore[no-untyped-call]
        return loss.detach(), gradients_in(model), expected[2]

    def _of_targets(self, gradient: Tensor, labels: Tensor) -> Iterator[Difference]:
        """Yield outputs that have no label and are trained to predict a token nevertheless.

        The gradient of a cross-entropy has one negative entry, that of the target, and sum 0. Other terms of
        a loss, such as a z-loss, may reach every output.
        """
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


def first_difference(composition: Composition, exam: Examination) -> str:
    """Return the name of the first module whose output differs, or "" if none can be compared.

    Only modules are compared that give one tensor (B, T, ...) or (B, C, T) for each call of the model.
    """
    if not exam.spec.per_position:
        return ""
    execution = Execution(replace(composition, after=False), exam)
    with _recorded(execution.model) as composed:
        list(execution.compare())
    plain = []
    for place in execution.call.places:
        model = execution.exam.model()
        with _recorded(model) as record, torch.no_grad():
            execution.exam.plain(model, execution.exam.sequence(*place.sequence))
        plain.append(record)
    names = (name for name in composed if all(len(record.get(name, ())) == 1 for record in plain))
    return next((n for n in names if _differs(execution, composed[n], [r[n][0] for r in plain])), "")


def _differs(execution: Execution, parts: list[Tensor], plain: list[Tensor]) -> bool:
    """Return True if a module has other outputs than in the plain calls.

    Args:
        execution: the composition under test.
        parts: outputs of its calls, one for each part of the sequence.
        plain: outputs (1, T, ...) of the plain calls.
    """
    # Positions may be the last dimension (B, C, T), as after a convolution.
    if parts[0].ndim == 3 and parts[0].shape[1] != execution.question.width == parts[0].shape[2]:
        parts, plain = ([each.transpose(1, 2) for each in outputs] for outputs in (parts, plain))
    found = torch.cat(parts, dim=1)
    if found.shape[:2] != execution.call.inputs.shape[:2]:
        return False
    found = execution.call.restored(found)
    for place, expected in zip(execution.call.places, plain, strict=True):
        row = found[place.row : place.row + 1, place.start : place.end]
        if row.shape != expected.shape:
            return False
        if not float(execution.gaps(place, expected[0], row[0]).max()) <= execution.exam.limit:
            return True
    return False


@contextmanager
def _recorded(model: nn.Module) -> Iterator[dict[str, list[Tensor]]]:
    """Record the first floating-point tensor (B, T, ...) that each submodule returns in this context."""
    record: dict[str, list[Tensor]] = defaultdict(list)

    def keep(name: str, output: object) -> None:
        first = next(tensors_in(output), None)
        if first is not None and first.is_floating_point() and first.ndim >= 3:
            record[name].append(first.detach())

    handles = (
        module.register_forward_hook(lambda *call, name=name: keep(name, call[-1]))
        for name, module in model.named_modules()
        if name
    )
    with temporary_hooks(handles):
        yield record


def _arranged(question: Question, exam: Examination) -> Call:
    """Return the tensors of a question."""
    shape, device = (len(question.rows), question.width), exam.subject.device
    places: list[Place] = []
    rows: list[Tensor] = []
    keep = torch.ones(shape, dtype=torch.bool, device=device)
    documents = torch.zeros(shape, dtype=torch.long, device=device)
    for row, segments in enumerate(question.rows):
        end, parts = 0, list[Tensor]()
        for segment in segments:
            start, end = end, end + segment.length
            if segment.kind == "sequence":
                number = len(places) if segment.number is None else segment.number
                places.append(Place(row, start, end, number))
                parts.append(exam.sequence(number, segment.length))
                documents[row, start:] += start > 0
            else:
                fill = exam.padding if segment.kind == "padding" else exam.filler
                parts.append(fill(*shape)[row, start:end])
                keep[row, start:end] = segment.kind != "padding"
        rows.append(torch.cat(parts))
    call = Call(torch.stack(rows).to(device), places, question=question)
    call.keep = keep if question.mask else None
    call.documents = documents if question.documents else None
    if question.in_turns or question.operation is not None:
        call.others = exam.filler(*shape)
    if question.ignored is not None:
        call.labels = _labels(call, question.ignored, exam)
    return call


def _labels(call: Call, ignored: float, exam: Examination) -> Tensor:
    """Return the ids of the sequences as labels, a share of them ignored.

    The first label of a sequence is ignored: the output before it belongs to padding or another sequence.
    """
    labels = torch.full_like(call.inputs, -100)
    for index, place in enumerate(call.places):
        some = exam.sequence(*place.sequence)
        rng = torch.Generator().manual_seed(exam.subject.seed + index)
        some[torch.rand(len(some), generator=rng) < ignored] = -100
        some[0] = -100
        labels[place.row, place.start : place.end] = some
    return labels


def _logits_in_graph(outputs: list[Any], call: Call) -> Tensor | None:
    """Return the logits of the last output, if the loss may have been computed from them."""
    try:
        logits = logits_of(outputs[-1])
    except (TypeError, IndexError):
        return None
    fits = logits.requires_grad and logits.ndim == 3 and logits.shape[:2] == call.inputs.shape[:2]
    return logits if fits else None


def _summed(gradients: list[Gradients]) -> Gradients:
    total: dict[str, Tensor] = {}
    for name, gradient in (item for each in gradients for item in each.items()):
        total[name] = total[name] + gradient if name in total else gradient
    return total
