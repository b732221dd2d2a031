"""Padding: rows of different lengths in one batch compute what they compute alone.

Shapes: B batch, T positions, N real positions of the batch, V outputs.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor, nn

from stackwise.checks.check import check
from stackwise.checks.probe.call import (
    dtype_of,
    masked,
    reads_padding_by_a_state,
    real_inputs,
    reason_of,
    refusals,
)
from stackwise.checks.probe.difference import NOT_REPEATED, hear, relative_difference, repeats
from stackwise.checks.result import CheckResult, listed
from stackwise.checks.subject import Subject
from stackwise.subject.call_form import ContiguousCall
from stackwise.subject.capability import padding_id
from stackwise.subject.inference import cast, logits_of

_LENGTH = 12

_ADVICE_READ = (
    "Look for a mask that is not passed on to attention, that another mask (causal, window) replaces, whose "
    "True and False are swapped, or that only one mode or one backend applies; and for a mean, a norm or a "
    "convolution over all positions."
)
_ADVICE_AMOUNT = {
    "left": "Count positions from each row's first real token (cumsum of the mask), not from the "
    "first column.",
    "right": "Look for positions counted from the end, for scales and means that take in the whole length, "
    "and for a last token taken at index -1.",
}
_ADVICE_EMPTY = (
    "A query that may look at nothing has a softmax over nothing. Let padded queries see themselves, or use "
    "a large finite number that is added once: two of the lowest numbers add up to -inf."
)


@dataclass(frozen=True)
class _Ragged:
    """Rows of different lengths, padded on one side to T.

    Attributes:
        rows: the real inputs of each, (1, length, ...).
        side: where padding is.
        length: T.
        per_position: the output has an entry per position; False: one per row.
    """

    rows: tuple[Tensor, ...]
    side: str
    length: int
    per_position: bool

    @cached_property
    def keep(self) -> Tensor:
        """(B, T), true at real positions."""
        places = torch.arange(self.length, device=self.rows[0].device)
        lengths = torch.tensor([row.shape[1] for row in self.rows], device=places.device)[:, None]
        return places < lengths if self.side == "right" else places >= self.length - lengths

    def padded(self, content: Tensor) -> Tensor:
        """The batch, with `content` (B, T, ...) where padding is."""
        batch = content.clone()
        for i, row in enumerate(self.rows):
            batch[i, self.keep[i]] = row[0].to(batch.dtype)
        return batch

    def real(self, output: Tensor) -> Tensor:
        """Return the real positions (N, V) of an output (B, T, V), or the rows of an output per row."""
        return output[self.keep] if self.per_position else output.flatten(1)

    def place(self, index: int) -> str:
        """Return the place of the real position `index` of N, or of the row."""
        if not self.per_position:
            return f"row {index} ({self.side} padding)"
        row, position = self.keep.nonzero()[index].tolist()
        return f"row {row}, position {position} ({self.side} padding)"


def _ragged(subject: Subject) -> list[_Ragged]:
    """One batch for each side that the model claims."""
    T = min(subject.seq_len, _LENGTH)
    inputs = real_inputs(subject, 3, T)
    lengths = (T, max(1, 2 * T // 3), max(1, T // 3))
    rows = tuple(inputs[i : i + 1, :n] for i, n in enumerate(lengths))
    return [_Ragged(rows, side, T, subject.spec.per_position) for side in subject.spec.padding_sides]


def _padding_token(subject: Subject) -> int | None:
    """Return the id of padding of a text classifier: heads of decoders find the last token by this id."""
    is_classifier = subject.spec.inputs == "tokens" and not subject.spec.per_position
    return padding_id(subject.model()) if is_classifier else None


def _contents(subject: Subject, T: int) -> Iterator[Tensor]:
    """Yield the contents of padding: the padding token, or other inputs and then conspicuous ones."""
    if (token := _padding_token(subject)) is not None:
        yield torch.full_like(real_inputs(subject, 3, T), token)
        return
    yield real_inputs(subject, 3, T, shift=1)
    if subject.spec.make_batch is not None:
        yield real_inputs(subject, 3, T, shift=2)
    elif subject.spec.inputs == "tokens":
        yield torch.full_like(real_inputs(subject, 3, T), subject.spec.width - 1)
    else:
        yield 100 * real_inputs(subject, 3, T, shift=2)


def _unasked(subject: Subject) -> str | None:
    """Why padding cannot be asked about."""
    if subject.spec.masked is None:
        return "needs masked: (model, inputs, keep) -> output, of a batch with padding"
    if not subject.spec.padding_sides:
        return "needs padding_sides: the model claims no side on which padding may be"
    if subject.seq_len < 3:
        return "needs at least 3 positions"
    return None


@check
def padding_content(subject: Subject) -> CheckResult:
    """Does what stands in padding leave every real output as it was, in eval and in train mode?"""
    if reason := _unasked(subject):
        return subject.not_applicable(reason)
    if _padding_token(subject) is not None:
        return subject.not_applicable("needs a model without the id of a padding token")
    batches = _ragged(subject)

    def changes(model: nn.Module) -> Tensor:
        """(side, N): the relative change at each real position."""
        return torch.cat([change(model, ragged) for ragged in batches])

    def change(model: nn.Module, ragged: _Ragged) -> Tensor:
        one, two = (
            ragged.real(masked(subject, model, ragged.padded(content), ragged.keep))[None]
            for content in _contents(subject, ragged.length)
        )
        return relative_difference(one, two).amax(dim=-1)

    # Statistics over a batch, as of BatchNorm in train mode, take in its padding by design.
    by_batch = any(isinstance(m, nn.modules.batchnorm._BatchNorm) for m in subject.model().modules())
    for train in (False,) if by_batch else (False, True):
        found = hear(subject, changes, same_shapes=True, train=train, fill_zeros=True)
        if found.real:
            break
    if _ignores_mask(subject):
        sees_all = subject.spec.causal is False or not subject.spec.per_position
        if found.real and sees_all:
            return subject.failed(
                found.value,
                found.limit,
                meaning="The model sees both sides and ignores its mask: real outputs read padding.",
                advice="Declare masked=None if it claims no padding. " + _ADVICE_READ,
            )
        return subject.warned(
            found.value,
            found.limit,
            meaning="The model takes a mask and ignores it.",
            correct_if="padding is always on the right, where no position reads it, or found by its id, or"
            " if the argument exists for callers only (then declare masked=None)",
            advice=_ADVICE_READ,
        )
    if found.real and reads_padding_by_a_state(subject, _LENGTH):
        return subject.warned(
            found.value,
            found.limit,
            where="left padding",
            meaning="A recurrent state reads padding on the left.",
            correct_if="padding is always on the right; then declare padding_sides=('right',)",
            advice="Hide padding from convolutions and states, as from attention.",
        )
    if found.real:
        side, index = divmod(int(found.gaps.argmax()), found.gaps.shape[1])
        return subject.failed(
            found.value,
            found.limit,
            where=f"{batches[side].place(index)}, {'train' if train else 'eval'} mode",
            meaning="The output at a real position depends on what stands in padding.",
            advice=_ADVICE_READ,
        )
    return subject.passed(found.value, found.limit, meaning=found.meaning)


def _ignores_mask(subject: Subject) -> bool:
    """Whether an argument's name is all that tells of a mask, on the right only, and it hides nothing."""
    by_mask = subject.spec.masked
    function = by_mask.function if isinstance(by_mask, ContiguousCall) else None
    inferred = getattr(function, "__module__", "") == "stackwise.subject.capability"
    if not inferred or subject.spec.padding_sides != ("right",):
        return False
    model, inputs = subject.model(fill_zeros=True), real_inputs(subject, 1, min(subject.seq_len, _LENGTH))
    everything = torch.ones(inputs.shape[:2], dtype=torch.bool, device=inputs.device)
    but_first = everything.clone()
    but_first[:, 0] = False
    one, two = (masked(subject, model, inputs, keep) for keep in (everything, but_first))
    return torch.equal(one[:, 1:], two[:, 1:]) if subject.spec.per_position else torch.equal(one, two)


@check
def padding_amount(subject: Subject) -> CheckResult:
    """Does a padded row compute what it computes alone?"""
    if reason := _unasked(subject):
        return subject.not_applicable(reason)
    batches = _ragged(subject)

    def gaps(model: nn.Module) -> Tensor:
        """(side, N): the relative difference at each real position."""
        return torch.cat([gap(model, ragged) for ragged in batches])

    def gap(model: nn.Module, ragged: _Ragged) -> Tensor:
        content = next(_contents(subject, ragged.length))
        together = ragged.real(masked(subject, model, ragged.padded(content), ragged.keep))
        apart = [
            masked(subject, model, row, row.new_ones(row.shape[:2], dtype=torch.bool)) for row in ragged.rows
        ]
        alone = torch.cat([each[0] if ragged.per_position else each.flatten(1) for each in apart])
        return relative_difference(alone[None], together[None]).amax(dim=-1)

    try:
        gaps(subject.model())
    except refusals() as error:
        return subject.not_applicable(
            f"needs rows of {batches[0].rows[-1].shape[1]} alone: {reason_of(error)}"
        )
    found = hear(subject, gaps, same_shapes=False, fill_zeros=True)
    if not found.real:
        return subject.passed(found.value, found.limit, meaning=found.meaning)
    if not repeats(subject):
        return subject.not_applicable(NOT_REPEATED)
    if _ignores_mask(subject):
        return subject.not_applicable("needs a mask that changes something; this one does not")
    if reads_padding_by_a_state(subject, _LENGTH):
        return subject.not_applicable("needs a state that passes by padding on the left; see padding_content")
    side, index = divmod(int(found.gaps.argmax()), found.gaps.shape[1])
    return subject.failed(
        found.value,
        found.limit,
        where=batches[side].place(index),
        meaning="A padded row computes something else than the same row without padding.",
        advice=_ADVICE_AMOUNT[batches[side].side],
    )


@check
def padding_finite(subject: Subject) -> CheckResult:
    """Is a batch of unequal rows finite wherever a full one is, in bfloat16 and float16 too?"""
    if reason := _unasked(subject):
        return subject.not_applicable(reason)
    asked = []
    for dtype in (None, torch.bfloat16, torch.float16):
        model = subject.model(dtype=dtype)
        name = str(dtype or dtype_of(model)).removeprefix("torch.")
        for ragged in _ragged(subject):
            content = next(_contents(subject, ragged.length))
            everything = torch.ones_like(ragged.keep)
            try:
                full = masked(subject, model, ragged.padded(content), everything)
                output = masked(subject, model, ragged.padded(content), ragged.keep)
            except refusals():
                if dtype is None:
                    raise
                continue  # it does not run in this dtype
            if not full.isfinite().all():
                continue  # padding is not to blame
            asked.append(name)
            bad = ~ragged.real(output).isfinite().flatten(1).all(dim=1)
            if bad.any():
                return subject.failed(
                    bad.double().mean().item(),
                    0.0,
                    where=f"{ragged.place(int(bad.nonzero()[0]))}, {name}",
                    meaning="Real positions are not finite beside padding; the same batch unmasked is.",
                    advice=_ADVICE_EMPTY,
                )
    if not asked:
        return subject.not_applicable("needs an output that is finite without padding")
    return subject.passed(0.0, 0.0, where=", ".join(dict.fromkeys(asked)))


@check
def padding_empty_row(subject: Subject) -> CheckResult:
    """Does a row of nothing but padding leave the other rows as they were?"""
    if reason := _unasked(subject):
        return subject.not_applicable(reason)
    inputs, everything, without = _with_empty_row(subject)
    others = without.any(dim=1)

    def changes(model: nn.Module) -> Tensor:
        one, two = (masked(subject, model, inputs, keep)[others] for keep in (everything, without))
        return relative_difference(one, two)

    try:
        masked(subject, subject.model(), inputs, without)
    except refusals() as error:
        return subject.not_applicable(
            f"needs a row of nothing but padding, which is refused: {reason_of(error)}"
        )
    found = hear(subject, changes, same_shapes=True, fill_zeros=True)
    if found.real:
        return subject.failed(
            found.value,
            found.limit,
            where=f"row {int((~others).nonzero()[0])} of {len(inputs)} is empty",
            meaning="A row of nothing but padding changes the other rows.",
            advice=_ADVICE_EMPTY,
        )
    return subject.passed(found.value, found.limit, meaning=found.meaning)


@check
def padding_gradients(subject: Subject) -> CheckResult:
    """Are the gradients of real positions finite beside padding, and beside a row of nothing else?"""
    if reason := _unasked(subject):
        return subject.not_applicable(reason)
    if not any(p.requires_grad for p in subject.model().parameters()):
        return subject.not_applicable("no parameter is trainable")
    inputs, everything, without = _with_empty_row(subject)
    if bad := _bad_gradients(subject, inputs, everything):
        return subject.not_applicable(f"needs gradients that are finite without padding; {bad[0]} has others")
    # An empty row has no mean. Classifiers are not called with one.
    cases = {"a row of nothing but padding": (inputs, without)} if subject.spec.per_position else {}
    for ragged in _ragged(subject):
        batch = ragged.padded(next(_contents(subject, ragged.length)))
        cases[f"{ragged.side} padding"] = (batch, ragged.keep)
    asked = []
    for name, (batch, keep) in cases.items():
        try:
            bad = _bad_gradients(subject, batch, keep)
        except refusals():
            if keep is not without:
                raise
            continue  # such a row is refused
        asked.append(name)
        if bad:
            return subject.failed(
                float(len(bad)),
                0.0,
                where=listed(bad),
                meaning=f"Parameters whose gradient is not finite beside {name}, though only real positions "
                "are asked for.",
                advice=_ADVICE_EMPTY + " A NaN times a weight of 0 is still NaN on the way back.",
            )
    return subject.passed(0.0, 0.0, where=", ".join(asked))


def _with_empty_row(subject: Subject) -> tuple[Tensor, Tensor, Tensor]:
    """Three rows, a mask that keeps all of them, and one that keeps nothing of the second."""
    inputs = real_inputs(subject, 3, min(subject.seq_len, _LENGTH))
    everything = torch.ones(inputs.shape[:2], dtype=torch.bool, device=inputs.device)
    without = everything.clone()
    without[1] = False
    return inputs, everything, without


def _bad_gradients(subject: Subject, inputs: Tensor, keep: Tensor) -> list[str]:
    """Parameters with a gradient that is not finite, of a random projection of the real outputs."""
    model, by_mask = subject.model(train=True), subject.spec.masked
    assert by_mask is not None
    with subject.fixed_randomness():
        output = logits_of(by_mask(model, cast(inputs.clone(), model), keep.clone()))
        # Rows of nothing but padding may have any output.
        output = output[keep] if subject.spec.per_position else output[keep.any(dim=1)]
        finite = output.detach().isfinite()
        # Outputs at -inf by design, as of a padded vocabulary, have no gradient.
        total = (output * torch.randn(output.shape[-1], device=output.device))[finite].sum()
        named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
        gradients = torch.autograd.grad(total, [p for _, p in named], allow_unused=True)
    each = zip(named, gradients, strict=True)
    return [name for (name, _), g in each if g is not None and not g.isfinite().all()]
