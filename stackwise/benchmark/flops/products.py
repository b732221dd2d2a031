"""Products of a call: the dtype of most of them, which under autocast differs from that of the weights."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn

from stackwise.benchmark.flops.counted import count_flops
from stackwise.benchmark.flops.shape_reader import weights_dtype

__all__ = ["Products", "products_of"]

_ALMOST_ALL = 0.99


@dataclass(frozen=True)
class Products:
    """Properties of the matrix products of a call.

    Attributes:
        dtype: most frequent dtype of the products.
        notes: notes for the reader about other products.
        recomputes: True if a backward pass repeats products. None: unknown.
    """

    dtype: torch.dtype
    notes: tuple[str, ...] = ()
    recomputes: bool | None = None


def products_of(call: Callable[[], object], model: nn.Module) -> Products:
    """Return the products of one more call. Without counted products, use the dtype of the weights.

    The call has been measured, so it is correct. If it cannot run under a counter, a note reports it.
    """
    try:
        counted = count_flops(call)
    except Exception as error:  # any error of torch's counter for an unknown operation
        dtype = weights_dtype(model)
        why = f"the products could not be counted ({type(error).__name__})"
        return Products(dtype, (f"{why}: the peak rate is that of the weights, {_name(dtype)}",))
    recomputes = counted.recomputed > 0
    if not counted.by_dtype:
        return Products(weights_dtype(model), (), recomputes)
    dtype, flops = next(iter(counted.by_dtype.items()))
    share = flops / sum(counted.by_dtype.values())
    others = f"{1 - share:.0%} of the products are not in {_name(dtype)}, whose peak rate this is of"
    return Products(dtype, (others,) if share < _ALMOST_ALL else (), recomputes)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
