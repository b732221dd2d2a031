"""GatedOptimizer: divides the gradients of an update, or skips the update on the device.

An optimizer skips a step on the device if its attribute `found_inf` is 1, and divides gradients by its
attribute `grad_scale`. The fused optimizers of torch do this.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from stackwise.support.arguments import require
from stackwise.support.optimizer_state import parameters_of

__all__ = ["GatedOptimizer", "check_skips_on_device", "start_momentum"]


class GatedOptimizer:
    """Optimizer whose next update is divided or skipped.

    Args:
        optimizer: any optimizer of torch.
        on_device: True if the optimizer is to skip steps on the device, unknown to the host: AdamW, Adam or
            SGD of torch with `fused=True`, or one that has the attribute `found_inf`.

    Raises:
        ValueError: an optimizer that cannot do this.
    """

    def __init__(self, optimizer: Any, *, on_device: bool) -> None:
        self._optimizer, self._on_device = optimizer, on_device
        self._reads_found_inf = _reads_found_inf(optimizer)
        if on_device:
            check_skips_on_device(optimizer, ", or lag=0, which makes the host wait at each step")

    def gate(self, found_inf: Tensor, divisor: Tensor | None) -> None:
        """Divide the gradients before the update, or let the optimizer divide them and skip the update.

        Args:
            found_inf: 1 if the update is to be skipped, otherwise 0. Ignored unless `on_device`.
            divisor: divisor of the gradients; None: they are not divided.
        """
        optimizer = self._optimizer
        if self._on_device:
            start_momentum(optimizer)
            optimizer.found_inf, optimizer.grad_scale = found_inf, divisor
        elif self._reads_found_inf:
            optimizer.found_inf, optimizer.grad_scale = None, divisor
        elif divisor is not None and divisor.item() != 1.0:
            torch._foreach_div_([p.grad for p in parameters_of(optimizer) if p.grad is not None], divisor)

    def release(self) -> None:
        """Reset the optimizer after the update. Otherwise unguarded steps would be divided or skipped."""
        if self._reads_found_inf:
            self._optimizer.found_inf = self._optimizer.grad_scale = None


def check_skips_on_device(optimizer: torch.optim.Optimizer, otherwise: str = "") -> None:
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
        require(_reads_found_inf(optimizer), "optimizer", type(optimizer).__name__, allowed)
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


def _reads_found_inf(optimizer: torch.optim.Optimizer) -> bool:
    if isinstance(optimizer, torch.optim.Adam | torch.optim.SGD):  # AdamW is an Adam
        return all(group.get("fused") for group in optimizer.param_groups)
    return hasattr(optimizer, "found_inf")
