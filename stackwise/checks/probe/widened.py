"""Widened: run a float64 model in float64 throughout, including its own casts to float32."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

__all__ = ["Widened"]

_NARROW = (torch.float32, torch.bfloat16, torch.float16)


class Widened(TorchFunctionMode):
    """Context in which every cast to a narrower floating-point dtype becomes a cast to float64.

    Many norms and losses cast their input to float32. That narrows a float64 model, and the rounding would
    disturb finite differences. The checks of precision examine such casts.
    """

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function in (Tensor.float, Tensor.half, Tensor.bfloat16):
            return args[0].double()
        kwargs = {key: _wide(value) for key, value in (kwargs or {}).items()}
        return function(*map(_wide, args), **kwargs)


def _wide(value: Any) -> Any:
    return torch.float64 if isinstance(value, torch.dtype) and value in _NARROW else value
