"""UpdateHold: an optimizer whose update is divided, or left out, as was decided on the device."""

from __future__ import annotations

from typing import Any

import torch

from stackwise.argument import require
from stackwise.stability.guard.judge import Decision

__all__ = ["UpdateHold"]


class UpdateHold:
    """Hands a decision to an optimizer.

    Args:
        optimizer: any of torch.
        by_itself: it is to leave steps out by itself, without the host knowing: AdamW, Adam or SGD of torch
            with `fused=True`, or one that has the attribute `found_inf`.

    Raises:
        ValueError: one that cannot.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, *, by_itself: bool) -> None:
        self.optimizer, self.by_itself = optimizer, by_itself
        self.reads_found_inf = _reads_found_inf(optimizer)
        if by_itself:
            _check_leaves_out(optimizer, self.reads_found_inf)

    def take(self, decision: Decision) -> None:
        """Before the update: gradients are divided, and the update left out where it does that by itself."""
        optimizer: Any = self.optimizer
        if self.by_itself:
            _start_momentum(optimizer)
            optimizer.found_inf, optimizer.grad_scale = decision.found_inf, decision.divisor
        elif self.reads_found_inf:
            optimizer.found_inf, optimizer.grad_scale = None, decision.divisor
        elif decision.divisor is not None and decision.divisor.item() != 1.0:
            groups = optimizer.param_groups
            gradients = [p.grad for group in groups for p in group["params"] if p.grad is not None]
            torch._foreach_div_(gradients, decision.divisor)

    def release(self) -> None:
        """Behind the update: steps that nobody guards would be divided, or left out, as this one."""
        if self.reads_found_inf:
            optimizer: Any = self.optimizer
            optimizer.found_inf = optimizer.grad_scale = None


def _reads_found_inf(optimizer: torch.optim.Optimizer) -> bool:
    if isinstance(optimizer, torch.optim.Adam | torch.optim.SGD):  # AdamW is an Adam
        return all(group.get("fused") for group in optimizer.param_groups)
    return hasattr(optimizer, "found_inf")


def _check_leaves_out(optimizer: torch.optim.Optimizer, reads: bool) -> None:
    """Refuse an optimizer that would make the update before the host knows better."""
    kind = type(optimizer).__name__
    allowed = (
        "AdamW, Adam or SGD of torch with fused=True, one that has `found_inf`, or lag=0, which makes the "
        "host wait at each step"
    )
    require(reads, "optimizer", kind, allowed)
    for index, group in enumerate(optimizer.param_groups):
        dampened = isinstance(optimizer, torch.optim.SGD) and group["momentum"] and group["dampening"]
        key = f"param_groups[{index}]['dampening']"
        require(not dampened, key, group.get("dampening"), "0, or lag=0: see Guard")


def _start_momentum(optimizer: torch.optim.Optimizer) -> None:
    """Zeros where there is no momentum yet: that of a first step left out would be whatever memory held."""
    if not isinstance(optimizer, torch.optim.SGD):
        return
    for group in optimizer.param_groups:
        if group["momentum"]:
            for p in group["params"]:
                if p.grad is not None and optimizer.state[p].get("momentum_buffer") is None:
                    optimizer.state[p]["momentum_buffer"] = torch.zeros_like(p)
