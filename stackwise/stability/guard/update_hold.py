"""UpdateHold: applies a decision to an optimizer: divides gradients, or skips the update on the device."""

from __future__ import annotations

from typing import Any

import torch

from stackwise.stability.found_inf import check_leaves_out, reads_found_inf, start_momentum
from stackwise.stability.guard.judge import Decision
from stackwise.support.optimizer_state import parameters_of

__all__ = ["UpdateHold"]


class UpdateHold:
    """Applies a decision to an optimizer.

    Args:
        optimizer: any optimizer of torch.
        by_itself: the optimizer is to skip steps on the device, unknown to the host: AdamW, Adam or SGD of
            torch with `fused=True`, or one that has the attribute `found_inf`.

    Raises:
        ValueError: an optimizer that cannot do this.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, *, by_itself: bool) -> None:
        self.optimizer, self.by_itself = optimizer, by_itself
        self.reads_found_inf = reads_found_inf(optimizer)
        if by_itself:
            check_leaves_out(optimizer, ", or lag=0, which makes the host wait at each step")

    def take(self, decision: Decision) -> None:
        """Divide the gradients before the update, or let the optimizer divide them and skip the update."""
        optimizer: Any = self.optimizer
        if self.by_itself:
            start_momentum(optimizer)
            optimizer.found_inf, optimizer.grad_scale = decision.found_inf, decision.divisor
        elif self.reads_found_inf:
            optimizer.found_inf, optimizer.grad_scale = None, decision.divisor
        elif decision.divisor is not None and decision.divisor.item() != 1.0:
            gradients = [p.grad for p in parameters_of(optimizer) if p.grad is not None]
            torch._foreach_div_(gradients, decision.divisor)

    def release(self) -> None:
        """Reset the optimizer after the update. Otherwise unguarded steps would be divided or skipped."""
        if self.reads_found_inf:
            optimizer: Any = self.optimizer
            optimizer.found_inf = optimizer.grad_scale = None
