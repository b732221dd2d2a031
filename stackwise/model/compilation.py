"""Compilation: torch.compile for one caller alone."""

from __future__ import annotations

from collections.abc import Callable
from types import FunctionType
from typing import Any

import torch

__all__ = ["compiled"]


def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function` compiled for fixed shapes, apart from whatever else compiled it.

    The compiler keeps few graphs for each code object and runs what is beyond them as it is; so each
    Rack and each optimizer gets a code object of its own.
    """
    assert isinstance(function, FunctionType)
    own = FunctionType(
        function.__code__.replace(),
        function.__globals__,
        function.__name__,
        function.__defaults__,
        function.__closure__,
    )
    own.__kwdefaults__ = function.__kwdefaults__
    return torch.compile(own, dynamic=False)
