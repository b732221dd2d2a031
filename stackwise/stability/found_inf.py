"""found_inf: optimizers that skip a step on the device if their attribute `found_inf` is 1."""

from __future__ import annotations

import torch

from stackwise.support.arguments import require

__all__ = ["check_leaves_out", "reads_found_inf", "start_momentum"]


def reads_found_inf(optimizer: torch.optim.Optimizer) -> bool:
    """Return True if it skips a step if its `found_inf` is 1, and divides gradients by its `grad_scale`."""
    if isinstance(optimizer, torch.optim.Adam | torch.optim.SGD):  # AdamW is an Adam
        return all(group.get("fused") for group in optimizer.param_groups)
    return hasattr(optimizer, "found_inf")


def check_leaves_out(optimizer: torch.optim.Optimizer, otherwise: str = "") -> None:
    """Refuse an optimizer that would update before the host knows the decision.

    Args:
        optimizer: any optimizer of torch.
        otherwise: further allowed cases, for the message.

    Raises:
        ValueError: an optimizer that does not read `found_inf`; SGD with dampening. SGD does not dampen the
            first gradient, but after the zeros of `start_momentum`, torch would treat it as a later one.
    """
    if not isinstance(optimizer, torch.optim.Adam | torch.optim.SGD):
        allowed = f"Adam, AdamW or SGD of torch with fused=True, one that has `found_inf`{otherwise}"
        require(reads_found_inf(optimizer), "optimizer", type(optimizer).__name__, allowed)
        return
    for index, group in enumerate(optimizer.param_groups):
        key, fused = f"param_groups[{index}]", group.get("fused")
        allowed = f"True, since only the fused kernels of torch read found_inf{otherwise}"
        require(bool(fused), f"{key}['fused']", fused, allowed)
        dampened = isinstance(optimizer, torch.optim.SGD) and group["momentum"] and group["dampening"]
        require(not dampened, f"{key}['dampening']", group.get("dampening"), f"0{otherwise}")


def start_momentum(optimizer: torch.optim.Optimizer) -> None:
    """Create missing momentum buffers of SGD with zeros.

    If a first step is skipped, torch would leave them uninitialized.
    """
    if not isinstance(optimizer, torch.optim.SGD):
        return
    for group in optimizer.param_groups:
        if group["momentum"]:
            for p in group["params"]:
                if p.grad is not None and optimizer.state[p].get("momentum_buffer") is None:
                    optimizer.state[p]["momentum_buffer"] = torch.zeros_like(p)
