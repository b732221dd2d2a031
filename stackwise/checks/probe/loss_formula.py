"""LossFormula: the formula of a model's own loss, found by its values for chosen labels.

The loss is compared with the cross-entropy of the model's own logits. If it differs, it is compared with
known mistakes: each combination of a shift, a kind of cross-entropy, a treatment of ignored labels and a
reduction. If none fits exactly, the formula is fitted to *differences* between losses of several labelings
with the same ignored labels. Terms that depend on no label cancel in these differences: a z-loss, a router's
loss, the uniform part of label smoothing.

Shapes: B rows, T positions, V vocabulary, K labelings.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from stackwise.checks.probe.backward import gradients_at
from stackwise.checks.probe.call import REFUSALS, reason_of
from stackwise.checks.subject import Subject
from stackwise.subject.inference import logits_of
from stackwise.support.system_errors import is_out_of_memory

__all__ = [
    "IGNORED",
    "LossFormula",
    "RefusedLabelsError",
    "UnreadableLossError",
    "expected_shift",
    "labelled_loss",
    "mean_cross_entropy",
    "part_that_learns",
    "part_without_labels",
    "read_loss_formula",
]

IGNORED = -100  # as in torch and transformers
_ROWS = 3
# Many models compute losses in float32, also if their weights are float64.
_ROUNDING = 256 * torch.finfo(torch.float32).eps
# Below this variation of the logits, formulas cannot be distinguished.
_MIN_SPREAD = 1e-3

_SHIFTS = (1, 0, 2, -1)
# Kind -> function from logits (B, T, V) to scores. The loss is minus the score of the label.
_SCORES: dict[str, Callable[[Tensor], Tensor]] = {
    "cross-entropy": lambda z: z.log_softmax(dim=-1),
    "softmax twice": lambda z: z.softmax(dim=-1).log_softmax(dim=-1),
    "probabilities": lambda z: z.softmax(dim=-1),
    "raw logits": lambda z: z,
}
_KINDS = tuple(_SCORES)
_IGNORED = ("skipped", "as token 0", "token 0 too")
_REDUCTIONS = ("mean", "sum", "all", "all shifted", "rows", "row means", "unshifted", "targets")


class UnreadableLossError(Exception):
    """The formula cannot be found, for the reason in the message."""


class RefusedLabelsError(Exception):
    """The loss does not take labels of -100. The message is that of the model."""


@dataclass(frozen=True)
class LossFormula:
    """Formula of a loss.

    Attributes:
        shift: label t is compared with the logits at t - shift.
        kind: "cross-entropy", "softmax twice", "probabilities" (no log) or "raw logits".
        ignored: treatment of -100: "skipped", "as token 0", "token 0 too" (token 0 is also skipped) or
            "smoothed" (label smoothing includes these positions).
        reduction: "mean" over the targets, "sum", or the divisor of a sum: "all" (B T), "all shifted"
            (B (T - 1)), "rows" (B), "unshifted" (labels before the shift), "targets" (if more than these are
            summed). "row means": mean of the means of the rows. "scaled": none of these.
        scale: weight of a target, times the number of targets. 1 for a mean.
        narrow: "bfloat16" or "float16" if every value was rounded to it, otherwise "".
        addition: term that depends on no label. nan: unknown.
        exact: the formula gives every value exactly.
        value: loss of the first labeling.
        expected: mean cross-entropy of the same labeling.
        known: a formula was found. Otherwise the other attributes have no meaning.
    """

    shift: int = 1
    kind: str = "cross-entropy"
    ignored: str = "skipped"
    reduction: str = "mean"
    scale: float = 1.0
    narrow: str = ""
    addition: float = 0.0
    exact: bool = True
    value: float = 0.0
    expected: float = 0.0
    known: bool = True


def read_loss_formula(subject: Subject) -> LossFormula:
    """Return the formula of `labelled_loss` in eval mode, in float64 if the model runs in it.

    Raises:
        UnreadableLossError: there is no labelled loss, or its formula cannot be found.
        RefusedLabelsError: labels of -100 raise.
    """

    def formula_or_reason() -> LossFormula | UnreadableLossError | RefusedLabelsError:
        try:
            return _formula(_read(subject))
        except (UnreadableLossError, RefusedLabelsError) as reason:
            return reason

    found = subject.once("loss formula", formula_or_reason)
    if isinstance(found, Exception):
        raise found
    return found


def _formula(reading: _Reading) -> LossFormula:
    for find in (_Reading.exact_formula, _Reading.narrow_formula, _Reading.formula_of_differences):
        for logits in reading.logits:
            if (found := find(reading, logits)) is not None:
                return found
    return reading.formula(reading.logits[0], exact=False, known=False, addition=torch.nan)


def _read(subject: Subject) -> _Reading:
    """Return the losses and logits of several labelings."""
    spec = subject.spec

    def need(is_met: bool, text: str) -> None:
        if not is_met:
            raise UnreadableLossError(f"needs {text}")

    need(spec.labelled_loss is not None, "labelled_loss")
    need(spec.inputs == "tokens", "token ids and logits over a vocabulary")
    need(subject.seq_len > 3, "at least 4 positions, to distinguish shifts")
    fill_zeros = subject.starts_at_zero
    inputs = subject.inputs(_ROWS)
    model = subject.model(dtype=torch.float64, fill_zeros=fill_zeros)
    try:
        plain = subject.logits(model, inputs)
        labelled_loss(subject, model, inputs, inputs)
    except REFUSALS:
        model = subject.model(fill_zeros=fill_zeros)
        plain = subject.logits(model, inputs)
    is_logits = plain.ndim == 3 and plain.shape[:2] == inputs.shape and plain.shape[-1] >= spec.width
    need(is_logits, f"logits over {spec.width} tokens, not outputs of shape {tuple(plain.shape)}")
    labelings = _labelings(subject, plain)
    values, captured = _losses(subject, model, inputs, labelings, plain)
    candidates = [[plain] * len(labelings)]
    if any(not torch.equal(logits, plain) for logits in captured):
        # In an encoder-decoder, the labels are the inputs of the decoder.
        candidates.append(captured)
    logits = [[z.double() for z in each] for each in candidates]
    return _Reading(logits, labelings, values, expected_shift(subject))


def _losses(
    subject: Subject, model: nn.Module, inputs: Tensor, labelings: list[Tensor], plain: Tensor
) -> tuple[list[float], list[Tensor]]:
    """Return the loss of each labeling, and the logits from which it was computed."""
    values, captured = [], []
    for index, labels in enumerate(labelings):
        try:
            value, logits = labelled_loss(subject, model, inputs, labels)
        except (IndexError, RuntimeError, ValueError) as error:
            if index == 0 or is_out_of_memory(error):
                raise
            raise RefusedLabelsError(reason_of(error)) from error
        values.append(value)
        captured.append(plain if logits is None or logits.shape != plain.shape else logits)
    return values, captured


def expected_shift(subject: Subject) -> int:
    """Return 1 if the model should predict the next token, 0 if the token itself."""
    return 1 if subject.spec.causal else 0


def mean_cross_entropy(logits: Tensor, labels: Tensor, shift: int) -> float:
    """Return the mean for logits (B, T, V) and labels (B, T), if label t is predicted at t - shift."""
    nll, weight, _ = _pairs(_SCORES[_KINDS[0]](logits.double()), labels, shift, "skipped")
    return float(nll.sum() / weight.sum())


@torch.no_grad()
def labelled_loss(
    subject: Subject, model: nn.Module, inputs: Tensor, labels: Tensor
) -> tuple[float, Tensor | None]:
    """Return the loss, and the logits of the same call, or None if it returns none."""
    assert subject.spec.labelled_loss is not None
    with _recorded_logits(model) as recorded, subject.fixed_randomness():
        value = subject.spec.labelled_loss(model, inputs.clone(), labels.clone())
    if value.numel() != 1:
        raise TypeError(f"labelled_loss: got shape {tuple(value.shape)}; allowed: a scalar")
    return value.double().item(), recorded[-1].clone() if recorded else None


@contextmanager
def _recorded_logits(model: nn.Module) -> Iterator[list[Tensor]]:
    """Inside, record the logits of each call of the model."""
    recorded: list[Tensor] = []

    def hook(_: nn.Module, __: Any, output: Any) -> None:
        with suppress(TypeError):
            recorded.append(logits_of(output))

    with model.register_forward_hook(hook):
        yield recorded


def part_that_learns(subject: Subject) -> float | None:
    """Return the share of labels with a logit that a step would increase, at the best shift.

    It is measured by the gradient of the loss with respect to the logits of the same call. None: the loss is
    not computed from these logits.
    """
    labels = subject.inputs(_ROWS, shift=1)
    gradient = _gradient_of_logits(subject, labels)
    if gradient is None:
        return None
    parts = []
    for shift in range(-(labels.shape[1] // 2), labels.shape[1] // 2 + 1):
        at, of = _shifted(gradient, labels, shift)
        parts.append((at.gather(-1, of[..., None]) < 0).double().mean().item())
    return max(parts)


def part_without_labels(subject: Subject) -> float:
    """Return the largest gradient of outputs far from any label, over that of all outputs. 0: not known."""
    labels = subject.inputs(_ROWS, shift=1)
    labels[:, : labels.shape[1] // 2] = IGNORED
    gradient = _gradient_of_logits(subject, labels)
    if gradient is None:
        return 0.0
    # Heads for later tokens read labels at the next positions.
    return float(gradient[:, : labels.shape[1] // 4].abs().max() / gradient.abs().max())


def _gradient_of_logits(subject: Subject, labels: Tensor) -> Tensor | None:
    """Return the gradient of the own loss at the logits (B, T, V) of the same call, or None."""
    spec, model = subject.spec, subject.model(fill_zeros=subject.starts_at_zero)
    assert spec.labelled_loss is not None
    inputs = subject.inputs(_ROWS)
    with _recorded_logits(model) as recorded, torch.enable_grad(), subject.fixed_randomness():
        loss = spec.labelled_loss(model, inputs, labels.clone())
    if not recorded or not recorded[-1].requires_grad or not loss.requires_grad:
        return None
    gradient = gradients_at(loss, [recorded[-1]])[0]
    if gradient is None or gradient.shape[:2] != labels.shape or not gradient.any():
        return None
    return gradient if gradient.ndim == 3 and gradient.shape[-1] >= spec.width else None


def _labelings(subject: Subject, logits: Tensor) -> list[Tensor]:
    """Return labels that do not depend on the inputs: all, then some ignored with and without token 0."""
    z = logits.double()
    B, T, width = *z.shape[:2], subject.spec.width
    nll = -z.log_softmax(dim=-1)[..., :width].amax(dim=(0, 1))
    # Columns of a padded or forbidden vocabulary, at -1e9, would hide all others.
    allowed = (nll < 20 + 4 * nll.median()).nonzero().flatten()
    others = allowed[allowed != 0]
    if len(others) < 2 or not z.isfinite().all(dim=-1).any():
        raise UnreadableLossError("needs at least 3 tokens with finite logits")
    if _spread(z[..., others.to(z.device)]) < _MIN_SPREAD:
        raise UnreadableLossError("needs logits that vary, to distinguish labels")
    generator = torch.Generator().manual_seed(subject.seed + 1)

    def draw(choices: Tensor) -> Tensor:
        return choices.cpu()[torch.randint(len(choices), (B, T), generator=generator)]

    keep = torch.ones(B, T, dtype=torch.bool)
    keep[0, 1::3] = False
    keep[1, T // 2 :] = False
    keep[2, : T - max(2, T // 4)] = False
    full = draw(allowed)
    ragged = [draw(allowed)] + [draw(others) for _ in range(4)]
    if 0 in allowed:
        full[0, 2] = full[1, 1] = ragged[0][0, 2] = ragged[0][1, 1] = 0
    labelings = [full, *(labels.masked_fill(~keep, IGNORED) for labels in ragged)]
    return [labels.to(logits.device) for labels in labelings]


def _spread(z: Tensor) -> float:
    """Return the standard deviation of the finite logits."""
    finite = z[z.isfinite()]
    return float(finite.std()) if finite.numel() > 1 else 0.0


@dataclass(frozen=True)
class _Reading:
    """Losses of several labelings, and the logits of each labeling in one or two versions."""

    logits: list[list[Tensor]]
    labelings: list[Tensor]
    values: list[float]
    expected_shift: int
    _scores: dict[tuple[int, str], Tensor] = field(default_factory=dict)

    def terms(
        self, z: Tensor, labels: Tensor, shift: int, kind: str = _KINDS[0], ignored: str = "skipped"
    ) -> _Terms:
        if (id(z), kind) not in self._scores:
            self._scores[id(z), kind] = _SCORES[kind](z)
        return _pairs(self._scores[id(z), kind], labels, shift, ignored)

    def plain(self, logits: list[Tensor], index: int = 0) -> float:
        """Return the mean cross-entropy of a labeling."""
        terms = self.terms(logits[index], self.labelings[index], self.expected_shift)
        return _reduce(terms, "mean", self.labelings[index]).item()

    def formula(self, logits: list[Tensor], index: int = 0, **attributes: Any) -> LossFormula:
        """Return a formula with the value of a labeling, and the expected shift if there is no other."""
        found = {"shift": self.expected_shift, **attributes}
        return LossFormula(value=self.values[index], expected=self.plain(logits, index), **found)

    def exact_formula(self, logits: list[Tensor]) -> LossFormula | None:
        """Return the formula with the fewest mistakes that gives every value, or None."""
        if all(_close(value, self.plain(logits, i)) for i, value in enumerate(self.values)):
            return self.formula(logits)
        found: list[tuple[int, dict[str, Any]]] = []
        for shift, kind, ignored in itertools.product(_SHIFTS, _KINDS, _IGNORED):
            terms = [
                self.terms(z, labels, shift, kind, ignored)
                for z, labels in zip(logits, self.labelings, strict=True)
            ]
            for reduction in _REDUCTIONS:
                triples = zip(terms, self.labelings, self.values, strict=True)
                if all(_close(v, _reduce(t, reduction, y).item()) for t, y, v in triples):
                    form = {"shift": shift, "kind": kind, "ignored": ignored, "reduction": reduction}
                    correct = (self.expected_shift, _KINDS[0], "skipped", "mean")
                    found.append((sum(map(operator.ne, form.values(), correct)), form))
        best = min(found, key=lambda each: each[0], default=None)
        return None if best is None else self.formula(logits, **best[1])

    def narrow_formula(self, logits: list[Tensor]) -> LossFormula | None:
        """Return the correct formula if each value is rounded to a narrow dtype, otherwise None."""
        values = torch.tensor(self.values, dtype=torch.float64)
        for dtype in (torch.bfloat16, torch.float16):
            near = all(
                abs(v - self.plain(logits, i)) <= 8 * torch.finfo(dtype).eps * abs(v)
                for i, v in enumerate(self.values)
            )
            if near and torch.equal(values, values.to(dtype).double()):
                return self.formula(logits, narrow=str(dtype).removeprefix("torch."), exact=False)
        return None

    def formula_of_differences(self, logits: list[Tensor]) -> LossFormula | None:
        """Return the formula of the terms that depend on labels. None: they are no cross-entropy."""
        # The last labelings share their ignored labels. If the logits depend on the labels, the other terms
        # do not cancel.
        chosen = range(2, len(self.labelings))
        if any(not torch.equal(logits[k], logits[2]) for k in chosen):
            return None
        values = torch.tensor([self.values[k] for k in chosen], dtype=torch.float64)
        moved = values[1:] - values[0]
        noise = _ROUNDING * max(1.0, float(values.abs().max()))
        fits = (
            (*fit, *form)
            for form in itertools.product(_SHIFTS, _KINDS[:3], ("mean", "row means"))
            if (fit := self._fit(logits, chosen, moved, *form)) is not None
        )
        best = min(fits, key=lambda each: each[0], default=None)
        if best is None:
            return None
        residual, scale, shift, kind, reduction = best
        if not residual <= max(1e-3 * float(moved.abs().max()), noise) or not moved.abs().max() > 32 * noise:
            return None
        labels = self.labelings[2]
        pairs = self.terms(logits[2], labels, shift, kind)
        if reduction == "mean":
            sizes = {name: scale * float(n / pairs.weight.sum()) for name, n in _divisors(pairs, labels)}
            reduction = next((name for name, size in sizes.items() if abs(size - 1) < 2e-3), "scaled")
        ignored = "skipped"
        if reduction == "scaled" and 0 < 1 - scale < 0.5 and kind == _KINDS[0]:
            ignored = self._smoothing(logits, shift)
            reduction = "mean" if ignored == "smoothed" else reduction
        return self.formula(
            logits,
            2,
            shift=shift,
            kind=kind,
            ignored=ignored,
            reduction=reduction,
            scale=scale,
            addition=self.values[2] - scale * float(_reduce(pairs, "mean", labels)),
            exact=False,
        )

    def _fit(
        self, logits: list[Tensor], chosen: range, moved: Tensor, shift: int, kind: str, reduction: str
    ) -> tuple[float, float] | None:
        """Return the residual and the factor of a cross-entropy that explains the differences of the loss."""
        sums = [
            _reduce(self.terms(logits[k], self.labelings[k], shift, kind), reduction, self.labelings[k])
            for k in chosen
        ]
        expected = torch.stack(sums).cpu()
        predicted = expected[1:] - expected[0]
        if not predicted.any():
            return None
        scale = float(moved @ predicted / (predicted @ predicted))
        return float((moved - scale * predicted).abs().max()), scale

    def _smoothing(self, logits: list[Tensor], shift: int) -> str:
        """Return "smoothed" if label smoothing includes the positions of ignored labels, else "skipped".

        Its uniform part, over the targets or over all positions, is fitted to the losses of all labelings.
        Only one of both fits exactly.
        """
        means, on_targets, everywhere, overall = [], [], [], []
        for z, labels in zip(logits, self.labelings, strict=True):
            nll, weight, _ = self.terms(z, labels, shift)
            uniform = -self._scores[id(z), _KINDS[0]].mean(dim=-1)
            scored, _ = _shifted(uniform, labels, shift)
            means.append(float(nll.sum() / weight.sum()))
            on_targets.append(float((scored * weight).sum() / weight.sum()))
            everywhere.append(float(scored.sum() / weight.sum()))
            overall.append(float(scored.mean()))
        values = torch.tensor(self.values, dtype=torch.float64)

        def misfit(uniform: list[float]) -> float:
            terms = torch.tensor([means, uniform], dtype=torch.float64).T
            fitted = terms @ torch.linalg.lstsq(terms, values).solution
            return float((fitted - values).abs().max())

        right = misfit(on_targets)
        wrong = min(misfit(everywhere), misfit(overall))
        return "smoothed" if wrong < 0.1 * right and wrong <= _ROUNDING else "skipped"


class _Terms(NamedTuple):
    """Tensors (B, T - |shift|), one entry per pair of logits and label.

    Attributes:
        nll: loss of the pair.
        weight: 1 if the formula counts the pair.
        target: 1 if it should be counted.
    """

    nll: Tensor
    weight: Tensor
    target: Tensor


def _pairs(scores: Tensor, labels: Tensor, shift: int, ignored: str) -> _Terms:
    scores, labels = _shifted(scores, labels, shift)
    target = labels != IGNORED
    counts = target
    if ignored == "as token 0":
        counts = torch.ones_like(counts)
    elif ignored == "token 0 too":
        counts = counts & (labels != 0)
    nll = -scores.gather(-1, labels.clamp(min=0)[..., None])[..., 0]
    return _Terms(nll.masked_fill(~counts, 0.0), counts.double(), target.double())


def _shifted(outputs: Tensor, labels: Tensor, shift: int) -> tuple[Tensor, Tensor]:
    """Return the outputs at t - shift and the labels at t."""
    T = labels.shape[1]
    return outputs[:, max(0, -shift) : T - max(0, shift)], labels[:, max(0, shift) : T - max(0, -shift)]


def _reduce(terms: _Terms, reduction: str, labels: Tensor) -> Tensor:
    if reduction == "row means":
        return (terms.nll.sum(dim=1) / terms.weight.sum(dim=1)).nanmean()
    divisor: Tensor | float = dict(_divisors(terms, labels))[reduction]
    return terms.nll.sum() / divisor


def _divisors(terms: _Terms, labels: Tensor) -> Iterator[tuple[str, Any]]:
    """Yield the name of each reduction that divides a sum, and its divisor."""
    yield "mean", terms.weight.sum()
    yield "sum", 1.0
    yield "all", labels.numel()
    yield "all shifted", terms.weight.numel()
    yield "rows", len(labels)
    yield "unshifted", (labels != IGNORED).sum()
    yield "targets", terms.target.sum()


def _close(value: float, expected: float) -> bool:
    return abs(value - expected) <= _ROUNDING * max(1.0, abs(expected))
