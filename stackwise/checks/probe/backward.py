"""Backward: gradients at tensors of a graph, also through reentrant activation checkpoints."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

__all__ = ["gradients_at"]


def gradients_at(
    result: Tensor, tensors: Sequence[Tensor], weights: Tensor | None = None
) -> list[Tensor | None]:
    """Return the gradient of a result at each tensor, or None where the result does not depend on it.

    Reentrant checkpoints refuse `torch.autograd.grad`. Then the gradients are those of `backward`.

    Args:
        result: a scalar, or a tensor of any shape with `weights`.
        tensors: leaves, or other tensors of the graph.
        weights: factor of each element of the result, as in `Tensor.backward`.
    """
    try:
        return list(torch.autograd.grad(result, tensors, weights, retain_graph=True, allow_unused=True))
    except RuntimeError as error:
        if "use_reentrant" not in str(error):
            raise
    for tensor in tensors:
        if not tensor.is_leaf:
            tensor.retain_grad()
        tensor.grad = None
    result.backward(weights)  # type: ignore[no-untyped-call]
    return [tensor.grad for tensor in tensors]
