"""Invariance: the order of positions does not matter to a model without positions."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from stackwise.checks.check import check
from stackwise.checks.probe.difference import NOT_REPEATED, measure_difference, relative_difference, repeats
from stackwise.checks.result import CheckResult
from stackwise.checks.subject import Subject


@check
def permutation_equivariance(subject: Subject) -> CheckResult:
    """Are the outputs permuted in the same way if the positions are permuted?"""
    if not subject.spec.positionless:
        return subject.not_applicable("needs the claim: positionless=True")
    if subject.spec.causal or subject.seq_len < 2:
        return subject.not_applicable("needs at least 2 positions, and no causal mask, which is an order")
    inputs, T = subject.inputs(2), subject.seq_len
    order = torch.randperm(T, generator=torch.Generator().manual_seed(subject.seed)).to(inputs.device)
    orders = {"reversed": torch.arange(T, device=inputs.device).flip(0), "shuffled": order}

    def gaps(model: nn.Module) -> Tensor:
        """Return the difference between the output of reordered inputs and the reordered output."""
        output = subject.logits(model, inputs)
        others = ((output[:, order], subject.logits(model, inputs[:, order])) for order in orders.values())
        return torch.stack([relative_difference(*pair).max() for pair in others])

    found = measure_difference(subject, gaps, fill_zeros=True)
    if found.real and not repeats(subject):
        return subject.not_applicable(NOT_REPEATED)
    if found.real:
        worst = gaps(subject.model(dtype=found.dtype, fill_zeros=True)).argmax()
        return subject.failed(
            found.value,
            found.limit,
            where=f"positions {list(orders)[int(worst)]}",
            meaning="Positions in another order give other outputs, not the same in that order.",
            advice="Look for position embeddings, for a causal mask, for convolutions and shifts over "
            "positions, and for pooling that takes the first or last position.",
        )
    return subject.passed(found.value, found.limit, meaning=found.meaning)
