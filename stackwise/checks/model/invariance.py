"""Invariance: what must not matter does not matter."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from stackwise.checks.check import check
from stackwise.checks.probe.difference import NOT_REPEATED, hear, relative_difference, repeats
from stackwise.checks.result import CheckResult
from stackwise.checks.subject import Subject

BATCH_SIZE = 3


@check
def batch_invariance(subject: Subject) -> CheckResult:
    """Is a row's output the same alone as in a batch (eval mode)?"""
    inputs = subject.inputs(BATCH_SIZE)

    def gaps(model: nn.Module) -> Tensor:
        """(B,): the largest difference in each row."""
        together = subject.logits(model, inputs)
        alone = torch.cat([subject.logits(model, inputs[i : i + 1]) for i in range(BATCH_SIZE)])
        return relative_difference(together, alone).flatten(1).amax(dim=1)

    for fill_zeros in (False, True) if subject.starts_at_zero else (False,):
        found = hear(subject, gaps, same_shapes=False, fill_zeros=fill_zeros)
        if found.real and not repeats(subject):
            return subject.not_applicable(NOT_REPEATED)
        if found.real:
            row = int(found.gaps.argmax())
            return subject.failed(
                found.value,
                found.limit,
                where=f"row {row} of {BATCH_SIZE}" + (" (zero weights made random)" if fill_zeros else ""),
                meaning="A row's output depends on the other rows of its batch.",
                advice=_positions_first(subject.model())
                + "Look for a softmax, mean or norm over the batch dimension, BatchNorm in train mode, "
                "and reshape or view across it.",
            )
    return subject.passed(found.value, found.limit, meaning=found.meaning)


def _positions_first(model: nn.Module) -> str:
    """Return advice about the first layer that reads (T, B, ...), or ""."""
    kinds = (nn.RNNBase, nn.MultiheadAttention)
    layers = ((n, m) for n, m in model.named_modules() if isinstance(m, kinds) and not m.batch_first)
    name = next((n for n, _ in layers), None)
    if name is None:
        return ""
    return (
        f"{name or 'The model'} has batch_first=False, so it reads (T, B, ...): use batch_first=True, or "
        "declare forward=lambda m, x: m(x.transpose(0, 1)).transpose(0, 1). Otherwise: "
    )


@check
def permutation_equivariance(subject: Subject) -> CheckResult:
    """Do the outputs follow when the positions are put in another order?"""
    if not subject.spec.positionless:
        return subject.not_applicable("needs the claim: positionless=True")
    if subject.spec.causal:
        return subject.not_applicable("a causal mask is itself an order")
    if subject.seq_len < 2:
        return subject.not_applicable("needs at least 2 positions")
    inputs, T = subject.inputs(2), subject.seq_len
    order = torch.randperm(T, generator=torch.Generator().manual_seed(subject.seed)).to(inputs.device)
    orders = {"reversed": torch.arange(T, device=inputs.device).flip(0), "shuffled": order}

    def gaps(model: nn.Module) -> Tensor:
        """[order]: how far the output of the reordered inputs is from the reordered output."""
        output = subject.logits(model, inputs)
        return torch.stack(
            [
                relative_difference(output[:, order], subject.logits(model, inputs[:, order])).max()
                for order in orders.values()
            ]
        )

    found = hear(subject, gaps, same_shapes=False, fill_zeros=True)
    if found.real and not repeats(subject):
        return subject.not_applicable(NOT_REPEATED)
    if found.real:
        return subject.failed(
            found.value,
            found.limit,
            where=f"positions {list(orders)[int(found.gaps.argmax())]}",
            meaning="Positions in another order give other outputs, not the same in that order.",
            advice="Look for position embeddings, for a causal mask, for convolutions and shifts over "
            "positions, and for pooling that takes the first or last position.",
        )
    return subject.passed(found.value, found.limit, meaning=found.meaning)
