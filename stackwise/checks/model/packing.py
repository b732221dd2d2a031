"""Packing: several documents in one row compute what each computes alone.

Shapes: B batch, T positions, V outputs.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from stackwise.checks.check import check
from stackwise.checks.probe.difference import NOT_REPEATED, hear, relative_difference, repeats
from stackwise.checks.result import CheckResult
from stackwise.checks.subject import Subject
from stackwise.subject.inference import cast

_LENGTH = 15


@check
def packing_isolation(subject: Subject) -> CheckResult:
    """Does changing one document of a packed row leave the others as they were?"""
    if reason := _unasked(subject):
        return subject.not_applicable(reason)
    inputs, other = (subject.inputs(1, _length(subject), shift=shift) for shift in (0, 1))
    documents = _documents(inputs, _lengths(subject))
    n = int(documents.max()) + 1
    # Row d has another document d.
    changed = torch.cat([torch.where(_like(documents == d, inputs), other, inputs) for d in range(n)])
    same = documents != torch.arange(n, device=documents.device)[:, None]
    documents = documents.expand(n, -1)

    def leaks(model: nn.Module) -> Tensor:
        """[changed document, position]."""
        one, two = (_packed(subject, model, rows, documents) for rows in (inputs.expand_as(changed), changed))
        return relative_difference(one, two).amax(dim=-1).masked_fill(~same, 0.0)

    found = hear(subject, leaks, same_shapes=True, fill_zeros=True)
    if found.real:
        source, position = divmod(int(found.gaps.argmax()), inputs.shape[1])
        return subject.failed(
            found.value,
            found.limit,
            where=f"document {int(documents[0, position])} (position {position}) reads document {source}",
            meaning="A document's output depends on another document of its row.",
            advice="Look for a mask without the rule of equal documents, for a backend that drops it, and "
            "for convolutions, recurrent states and shifts that run across the border.",
        )
    return subject.passed(found.value, found.limit, meaning=found.meaning)


@check
def packing_alone(subject: Subject) -> CheckResult:
    """Does a document of a packed row compute what it computes alone?"""
    if reason := _unasked(subject):
        return subject.not_applicable(reason)
    lengths = _lengths(subject), _lengths(subject)[::-1]
    inputs = subject.inputs(2, _length(subject))
    documents = torch.cat([_documents(inputs, some) for some in lengths])

    def gaps(model: nn.Module) -> Tensor:
        """(B, T): the largest difference at each position."""
        together = _packed(subject, model, inputs, documents)
        alone = [
            torch.cat([subject.logits(model, part) for part in torch.split(row, list(some), dim=1)], dim=1)
            for row, some in zip(torch.split(inputs, 1), lengths, strict=True)
        ]
        return relative_difference(torch.cat(alone), together).amax(dim=-1)

    found = hear(subject, gaps, same_shapes=False, fill_zeros=True)
    if found.real and not repeats(subject):
        return subject.not_applicable(NOT_REPEATED)
    if found.real:
        row, position = divmod(int(found.gaps.argmax()), inputs.shape[1])
        return subject.failed(
            found.value,
            found.limit,
            where=f"row {row}, position {position}, in document {int(documents[row, position])}",
            meaning="A packed document computes something else than the same document alone.",
            advice="Positions start again at each document. If documents read each other, packing_isolation "
            "says so too.",
        )
    return subject.passed(found.value, found.limit, meaning=found.meaning)


def _unasked(subject: Subject) -> str | None:
    if subject.spec.packed is None:
        return "needs packed: (model, inputs, documents) -> output, of rows of several documents"
    if subject.seq_len < 4:
        return "needs at least 4 positions"
    return None


def _length(subject: Subject) -> int:
    return min(subject.seq_len, _LENGTH)


def _lengths(subject: Subject) -> tuple[int, ...]:
    """Three documents, the second one shorter and the third longer than the first."""
    T = _length(subject)
    first, second = max(1, T // 3), max(1, T // 5)
    return first, second, T - first - second


def _documents(inputs: Tensor, lengths: tuple[int, ...]) -> Tensor:
    """(1, T): documents counted from 0."""
    each = torch.arange(len(lengths), device=inputs.device)
    return each.repeat_interleave(torch.tensor(lengths, device=inputs.device))[None]


def _like(mask: Tensor, inputs: Tensor) -> Tensor:
    return mask if inputs.ndim == 2 else mask[..., None]


def _packed(subject: Subject, model: nn.Module, inputs: Tensor, documents: Tensor) -> Tensor:
    by_documents = subject.spec.packed
    assert by_documents is not None
    return subject.call(model, lambda: by_documents(model, cast(inputs.clone(), model), documents.clone()))
