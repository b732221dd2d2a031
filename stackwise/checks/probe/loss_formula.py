"""LossFormula: which formula a model's own loss is, read from what it gives for chosen labels.

The loss is a number that comes out of a call with labels. It is compared with the cross-entropy of the
model's own logits, and where it differs, with the mistakes that are known: every product of a shift, a
kind of cross-entropy, a treatment of ignored labels and a reduction. Where none of them fits to the
digit, the *differences* between losses of other labels under one mask tell what is read and how it is
weighed, since whatever depends on no label (z-loss, a router's loss, label smoothing's uniform part)
cancels.

Shapes: B rows, T positions, V vocabulary, K labelings.
"""

from __future__ import annotations

import itertools
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

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
    "read_loss_formula",
]

IGNORED = -100  # as in torch and transformers
_ROWS = 3
# Losses are computed in float32 by many models, whatever the dtype of their weights.
_ROUNDING = 256 * torch.finfo(torch.float32).eps
# Below this the labels hardly matter, and no formula can be told from another.
_MIN_SPREAD = 1e-3

_SHIFTS = (1, 0, 2, -1)
_KINDS = ("cross-entropy", "softmax twice", "probabilities", "raw logits")
_IGNORED = ("skipped", "as token 0", "token 0 too")
_REDUCTIONS = ("mean", "sum", "all", "all shifted", "rows", "row means", "unshifted", "targets")


class UnreadableLossError(Exception):
    """Nothing can be said about the loss; the message says why."""


class RefusedLabelsError(Exception):
    """The loss does not take labels of -100; the message is the model's."""


@dataclass(frozen=True)
class LossFormula:
    """What a loss is.

    Attributes:
        shift: label t is compared with the logits at t - shift.
        kind: "cross-entropy", "softmax twice", "probabilities" (negative instead of log), "raw logits".
        ignored: -100 is "skipped", counted "as token 0", or "token 0 too" is skipped; "smoothed" where
            label smoothing reaches it.
        reduction: "mean" over what is predicted; "sum"; "all" (B T), "all shifted" (B (T - 1)), "rows" (B),
            "unshifted" (targets before the shift), "targets" (where more than these are summed): the
            divisor of a sum; "row means": the mean of each row's; "scaled" where it is none of these.
        scale: weight of a target, times the number of targets: 1 for a mean.
        narrow: "bfloat16" or "float16" where every value was rounded to it, or "".
        addition: what is added that depends on no label, for the widest mask; nan: unknown.
        exact: whether the formula gives every value to the digit.
        value: the loss, of the first labeling.
        expected: the mean cross-entropy of the labeling.
        known: whether any formula was found; else the others say nothing.
        dtype: of the loss as computed in the model's own dtype.
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
    """The formula of `labelled_loss`, in eval mode and float64 (its own dtype where that is refused).

    Raises:
        UnreadableLossError: no labelled loss, or too little to read.
        RefusedLabelsError: labels of -100 raise.
    """
    reading = _read(subject)
    for logits in reading.logits:
        if (found := reading.exact_formula(logits)) is not None:
            return found
    for logits in reading.logits:
        if (found := reading.narrow_formula(logits)) is not None:
            return found
    for logits in reading.logits:
        if (found := reading.formula_of_differences(logits)) is not None:
            return found
    return LossFormula(
        exact=False,
        known=False,
        addition=torch.nan,
        value=reading.values[0],
        expected=reading.plain(reading.logits[0]),
    )


def _read(subject: Subject) -> _Reading:
    spec = subject.spec
    if spec.labelled_loss is None:
        raise UnreadableLossError("needs labelled_loss")
    if spec.inputs != "tokens":
        raise UnreadableLossError("needs token ids and logits over a vocabulary")
    if subject.seq_len < 4:
        raise UnreadableLossError("needs at least 4 positions, to tell shifts apart")
    fill_zeros = subject.starts_at_zero
    inputs = subject.inputs(_ROWS)
    model = subject.model(dtype=torch.float64, fill_zeros=fill_zeros)
    try:
        plain = subject.logits(model, inputs)
        labelled_loss(subject, model, inputs, inputs)
    except REFUSALS:
        model = subject.model(fill_zeros=fill_zeros)
        plain = subject.logits(model, inputs)
    if plain.ndim != 3 or plain.shape[:2] != inputs.shape or plain.shape[-1] < spec.width:
        raise UnreadableLossError(
            f"outputs of shape {tuple(plain.shape)} are no logits over {spec.width} tokens"
        )
    labelings = _labelings(subject, plain)
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
    candidates = [[plain] * len(labelings)]
    if any(not torch.equal(logits, plain) for logits in captured):
        # An encoder-decoder makes its decoder's inputs of the labels.
        candidates.append(captured)
    return _Reading(
        [[z.double() for z in logits] for logits in candidates],
        labelings,
        values,
        expected_shift=expected_shift(subject),
    )


def expected_shift(subject: Subject) -> int:
    """1 where the next token is predicted, 0 where the token itself is."""
    return 1 if subject.spec.causal else 0


def mean_cross_entropy(logits: Tensor, labels: Tensor, shift: int) -> float:
    """In float64, of logits (B, T, V) and labels (B, T), label t scored at t - shift."""
    nll, weight, _ = _pairs(_scores(logits.double(), _KINDS[0]), labels, shift, "skipped")
    return float(nll.sum() / weight.sum())


@torch.no_grad()
def labelled_loss(
    subject: Subject, model: nn.Module, inputs: Tensor, labels: Tensor
) -> tuple[float, Tensor | None]:
    """The loss, and the logits that the same call gives, where it shows any."""
    assert subject.spec.labelled_loss is not None
    seen: list[Tensor] = []

    def keep(_: nn.Module, __: Any, output: Any) -> None:
        with suppress(TypeError):
            seen.append(logits_of(output).detach().clone())

    handle = model.register_forward_hook(keep)
    try:
        with subject.fixed_randomness():
            value = subject.spec.labelled_loss(model, inputs.clone(), labels.clone())
    finally:
        handle.remove()
    if value.numel() != 1:
        raise TypeError(f"labelled_loss: got shape {tuple(value.shape)}; wanted a scalar")
    return value.double().item(), seen[-1] if seen else None


def part_that_learns(subject: Subject) -> float | None:
    """The part of the labels whose own logit the loss wants larger, at the shift where most are.

    By the gradient of the loss with respect to the logits that the same call gives; None where these are not
    seen, or are not what the loss is computed from.
    """
    spec, model = subject.spec, subject.model(fill_zeros=subject.starts_at_zero)
    inputs, labels = subject.inputs(_ROWS), subject.inputs(_ROWS, shift=1)
    seen: list[Tensor] = []

    def keep(_: nn.Module, __: Any, output: Any) -> None:
        with suppress(TypeError):
            seen.append(logits_of(output))

    assert spec.labelled_loss is not None
    handle = model.register_forward_hook(keep)
    try:
        with torch.enable_grad(), subject.fixed_randomness():
            loss = spec.labelled_loss(model, inputs.clone(), labels.clone())
    finally:
        handle.remove()
    if not seen or not seen[-1].requires_grad or not loss.requires_grad:
        return None
    gradient = torch.autograd.grad(loss, seen[-1], allow_unused=True)[0]
    if gradient is None or gradient.shape[:2] != labels.shape or not gradient.any():
        return None
    if gradient.ndim != 3 or gradient.shape[-1] < spec.width:
        return None
    T = labels.shape[1]
    parts = []
    for shift in range(-(T // 2), T // 2 + 1):
        at, of = (
            (gradient[:, : T - shift], labels[:, shift:])
            if shift >= 0
            else (gradient[:, -shift:], labels[:, :shift])
        )
        parts.append((at.gather(-1, of[..., None]) < 0).double().mean().item())
    return max(parts)


def _labelings(subject: Subject, logits: Tensor) -> list[Tensor]:
    """Labels independent of the inputs: full, then ragged with token 0, then ragged without it."""
    z = logits.double()
    B, T, width = *z.shape[:2], subject.spec.width
    nll = -z.log_softmax(dim=-1)[..., :width].amax(dim=(0, 1))
    # Columns of a padded or forbidden vocabulary, at -1e9, would swamp everything.
    allowed = (nll < 20 + 4 * nll.median()).nonzero().flatten()
    others = allowed[allowed != 0]
    if len(others) < 2 or not z.isfinite().all(dim=-1).any():
        raise UnreadableLossError("needs at least 3 tokens with finite logits")
    if _spread(z[..., others.to(z.device)]) < _MIN_SPREAD:
        raise UnreadableLossError("the logits hardly vary, so that no label can be told from another")
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
    """How far the log-probability of a token varies between positions and tokens."""
    finite = z[z.isfinite()]
    return float(finite.std()) if finite.numel() > 1 else 0.0


@dataclass(frozen=True)
class _Reading:
    """Losses of several labelings: `logits` are those of each labeling, in one or two versions."""

    logits: list[list[Tensor]]
    labelings: list[Tensor]
    values: list[float]
    expected_shift: int
    _scores: dict[tuple[int, str], Tensor] = field(default_factory=dict)

    def terms(
        self, z: Tensor, labels: Tensor, shift: int, kind: str = _KINDS[0], ignored: str = "skipped"
    ) -> _Terms:
        if (id(z), kind) not in self._scores:
            self._scores[id(z), kind] = _scores(z, kind)
        return _pairs(self._scores[id(z), kind], labels, shift, ignored)

    def plain(self, logits: list[Tensor], index: int = 0) -> float:
        """The mean cross-entropy, as it should be."""
        terms = self.terms(logits[index], self.labelings[index], self.expected_shift)
        return _reduce(terms, "mean", self.labelings[index]).item()

    def exact_formula(self, logits: list[Tensor]) -> LossFormula | None:
        """The one with the fewest mistakes that gives every value, or None."""
        if all(_close(value, self.plain(logits, i)) for i, value in enumerate(self.values)):
            return LossFormula(self.expected_shift, value=self.values[0], expected=self.plain(logits))
        best: tuple[int, LossFormula] | None = None
        for shift, kind, ignored in itertools.product(_SHIFTS, _KINDS, _IGNORED):
            terms = [
                self.terms(z, labels, shift, kind, ignored)
                for z, labels in zip(logits, self.labelings, strict=True)
            ]
            for reduction in _REDUCTIONS:
                pairs = zip(terms, self.labelings, self.values, strict=True)
                if not all(_close(v, _reduce(t, reduction, y).item()) for t, y, v in pairs):
                    continue
                mistakes = (shift != self.expected_shift) + (kind != _KINDS[0])
                mistakes += (ignored != "skipped") + (reduction != "mean")
                if best is None or mistakes < best[0]:
                    found = LossFormula(
                        shift, kind, ignored, reduction, value=self.values[0], expected=self.plain(logits)
                    )
                    best = mistakes, found
        return None if best is None else best[1]

    def narrow_formula(self, logits: list[Tensor]) -> LossFormula | None:
        """The right one, where each value is rounded to a narrow dtype."""
        values = torch.tensor(self.values, dtype=torch.float64)
        for dtype in (torch.bfloat16, torch.float16):
            near = all(
                abs(v - self.plain(logits, i)) <= 8 * torch.finfo(dtype).eps * abs(v)
                for i, v in enumerate(self.values)
            )
            if near and torch.equal(values, values.to(dtype).double()):
                return LossFormula(
                    self.expected_shift,
                    narrow=str(dtype).removeprefix("torch."),
                    exact=False,
                    value=self.values[0],
                    expected=self.plain(logits),
                )
        return None

    def formula_of_differences(self, logits: list[Tensor]) -> LossFormula | None:
        """What the labels do to the loss, whatever else it adds; None where that is no cross-entropy."""
        # The ragged labelings without token 0 share one mask; where the logits follow the labels,
        # differences say nothing.
        chosen = range(2, len(self.labelings))
        if any(not torch.equal(logits[k], logits[2]) for k in chosen):
            return None
        values = torch.tensor([self.values[k] for k in chosen], dtype=torch.float64)
        moved = values[1:] - values[0]
        noise = _ROUNDING * max(1.0, float(values.abs().max()))
        best: tuple[float, float, int, str, str] | None = None
        for shift, kind, by_row in itertools.product(_SHIFTS, _KINDS[:3], (False, True)):
            sums = []
            for k in chosen:
                terms = self.terms(logits[k], self.labelings[k], shift, kind)
                sums.append(_reduce(terms, "row means" if by_row else "mean", self.labelings[k]))
            expected = torch.stack(sums).cpu()
            predicted = expected[1:] - expected[0]
            if not predicted.any():
                continue
            scale = float(moved @ predicted / (predicted @ predicted))
            residual = float((moved - scale * predicted).abs().max())
            if best is None or residual < best[0]:
                best = residual, scale, shift, kind, "row means" if by_row else "mean"
        if best is None:
            return None
        residual, scale, shift, kind, reduction = best
        if not residual <= max(1e-3 * float(moved.abs().max()), noise) or not moved.abs().max() > 32 * noise:
            return None
        pairs = self.terms(logits[2], self.labelings[2], shift, kind)
        if reduction == "mean":
            reduction = self._reduction_of(scale, float(pairs.weight.sum()), shift)
        base = _reduce(pairs, "mean", self.labelings[2])
        addition = self.values[2] - scale * float(base)
        ignored = "skipped"
        if reduction == "scaled" and 0 < 1 - scale < 0.5 and kind == _KINDS[0]:
            ignored = self._smoothing(logits, shift)
            if ignored == "smoothed":
                reduction = "mean"
        return LossFormula(
            shift,
            kind,
            ignored,
            reduction,
            scale,
            addition=addition,
            exact=False,
            value=self.values[2],
            expected=self.plain(logits, 2),
        )

    def _reduction_of(self, scale: float, count: float, shift: int) -> str:
        labels = self.labelings[2]
        B, T = labels.shape
        divisors = {
            "mean": count,
            "sum": 1.0,
            "all": float(B * T),
            "all shifted": float(B * (T - abs(shift))),
            "rows": float(B),
            "unshifted": float((labels != IGNORED).sum()),
        }
        for name, divisor in divisors.items():
            if abs(scale * divisor / count - 1) < 2e-3:
                return name
        return "scaled"

    def _smoothing(self, logits: list[Tensor], shift: int) -> str:
        """Whether label smoothing takes in the positions of ignored labels ("smoothed") or not ("skipped").

        Its uniform part is fitted to the losses under every mask, over targets and over all positions;
        only one of the two fits to the digit.
        """
        means, on_targets, everywhere, overall = [], [], [], []
        for z, labels in zip(logits, self.labelings, strict=True):
            nll, weight, _ = self.terms(z, labels, shift)
            uniform = -self._scores[id(z), _KINDS[0]].mean(dim=-1)
            scored = uniform[:, : uniform.shape[1] - shift] if shift >= 0 else uniform[:, -shift:]
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
    """Of each pair of logits and label, (B, T - |shift|): its loss, whether it counts, and should."""

    nll: Tensor
    weight: Tensor
    target: Tensor


def _scores(z: Tensor, kind: str) -> Tensor:
    """What the loss takes the negative of, at the label (B, T, V)."""
    match kind:
        case "cross-entropy":
            return z.log_softmax(dim=-1)
        case "softmax twice":
            return z.softmax(dim=-1).log_softmax(dim=-1)
        case "probabilities":
            return z.softmax(dim=-1)
    assert kind == "raw logits"
    return z


def _pairs(scores: Tensor, labels: Tensor, shift: int, ignored: str) -> _Terms:
    if shift > 0:
        scores, labels = scores[:, :-shift], labels[:, shift:]
    elif shift < 0:
        scores, labels = scores[:, -shift:], labels[:, :shift]
    target = labels != IGNORED
    counts = target
    if ignored == "as token 0":
        counts = torch.ones_like(counts)
    elif ignored == "token 0 too":
        counts = counts & (labels != 0)
    nll = -scores.gather(-1, labels.clamp(min=0)[..., None])[..., 0]
    return _Terms(nll.masked_fill(~counts, 0.0), counts.double(), target.double())


def _reduce(terms: _Terms, reduction: str, labels: Tensor) -> Tensor:
    nll, weight, target = terms
    total = nll.sum()
    match reduction:
        case "mean":
            return total / weight.sum()
        case "targets":
            return total / target.sum()
        case "sum":
            return total
        case "all":
            return total / labels.numel()
        case "all shifted":
            return total / weight.numel()
        case "rows":
            return total / len(labels)
        case "row means":
            return (nll.sum(dim=1) / weight.sum(dim=1)).nanmean()
    assert reduction == "unshifted"
    return total / (labels != IGNORED).sum()


def _close(value: float, expected: float) -> bool:
    return abs(value - expected) <= _ROUNDING * max(1.0, abs(expected))
