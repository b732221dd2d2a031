"""Products: the dtype that a call multiplies in, which is not that of the weights under autocast."""

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
    """What is known of the products of a call.

    Attributes:
        dtype: of most of them.
        notes: what a reader must know of the others.
        recomputes: whether a backward pass makes some of them a second time; None: not known.
    """

    dtype: torch.dtype
    notes: tuple[str, ...] = ()
    recomputes: bool | None = None


def products_of(call: Callable[[], object], model: nn.Module) -> Products:
    """As seen in one more call; where it multiplies nothing that is counted, the dtype of the weights.

    A call that was measured is sound: where it cannot be made under a counter, that is a note.
    """
    try:
        counted = count_flops(call)
    except Exception as error:  # whatever torch's counter makes of an operation that it does not know
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
