"""Non-finite tensors: finds NaN and infinities on the device, without a host synchronization.

Shapes: T tensors.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

__all__ = ["examinable", "non_finite"]

_PLAIN = (Tensor, torch.nn.Parameter)


def examinable(tensor: Tensor) -> Tensor | None:
    """Return the elements of this process as real numbers.

    None: integers, float8, an empty or sparse tensor, or a subclass other than a parameter or a DTensor.
    """
    tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    floating = tensor.is_floating_point() or tensor.is_complex()
    plain = type(tensor) in _PLAIN and tensor.layout is torch.strided
    if not (plain and floating and tensor.itemsize > 1 and tensor.numel()):
        return None
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


@torch.no_grad()
def non_finite(tensors: Sequence[Tensor], *, masks: bool = False) -> Tensor:
    """Return True for each tensor with a NaN or an infinity: boolean (T,), on the first tensor's device.

    Args:
        tensors: at least one tensor, as `examinable` returns it.
        masks: allow -inf, which additive masks contain.
    """
    groups: dict[tuple[torch.dtype, torch.device], list[int]] = {}
    for index, tensor in enumerate(tensors):
        groups.setdefault((tensor.dtype, tensor.device), []).append(index)
    found: list[Tensor] = [tensors[0]] * len(tensors)
    for (_, device), indices in groups.items():
        members = [tensors[index] for index in indices]
        flags = _on_cpu(members, masks) if device.type == "cpu" else _on_device(members, masks)
        if len(groups) == 1:
            return flags
        for index, flag in zip(indices, flags.to(tensors[0].device, non_blocking=True).unbind(), strict=True):
            found[index] = flag
    return torch.stack(found)


def _on_device(members: list[Tensor], masks: bool) -> Tensor:
    extremes = torch._foreach_max(members) if masks else torch._foreach_norm(members, math.inf)
    return ~(torch.stack(extremes) < math.inf)


def _on_cpu(members: list[Tensor], masks: bool) -> Tensor:
    """Return the flags of tensors on the CPU.

    An L2 norm takes a third of the time of a maximum. If it overflows, the elements decide.
    """
    norms = torch.stack(torch._foreach_norm(members, 2))
    flags = ~norms.isfinite()
    for index in flags.nonzero().flatten().tolist():
        tensor = members[index]
        flags[index] = (~(tensor < math.inf) if masks else ~tensor.isfinite()).any()
    return flags
