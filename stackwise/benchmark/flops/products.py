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
    """The dtype of most products of a call, and what a reader must know of the others."""

    dtype: torch.dtype
    notes: tuple[str, ...] = ()


def products_of(call: Callable[[], object], model: nn.Module) -> Products:
    """As seen in one more call; where it multiplies nothing that is counted, the dtype of the weights."""
    by_dtype = count_flops(call).by_dtype
    if not by_dtype:
        return Products(weights_dtype(model))
    dtype, flops = next(iter(by_dtype.items()))
    share = flops / sum(by_dtype.values())
    name = str(dtype).removeprefix("torch.")
    others = f"{1 - share:.0%} of the products are not in {name}, whose peak rate this is of"
    return Products(dtype, (others,) if share < _ALMOST_ALL else ())
