"""Outputs of modules: find the tensor that can be broken, and replace it."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

__all__ = ["first_tensor", "with_first"]


def first_tensor(output: Any) -> Tensor | None:
    """Return the floating-point tensor that can be broken in a module's output, or None."""
    if isinstance(output, tuple | list) and output:
        output = output[0]
    elif isinstance(output, Mapping):
        output = output.get(_key(output))
    return output if _breakable(output) else None


def with_first(output: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """Return a copy of the output in which `change` was applied to its first floating-point tensor."""
    tensor = first_tensor(output)
    assert tensor is not None
    changed = change(tensor)
    if isinstance(output, tuple):
        parts = (changed, *output[1:])
        return type(output)(*parts) if hasattr(output, "_fields") else parts
    if isinstance(output, list):
        return [changed, *output[1:]]
    if isinstance(output, Mapping):
        other: Any = copy.copy(output)
        other[_key(output)] = changed
        return other
    return changed


def _breakable(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point() and value.numel() > 0


def _key(output: Mapping[Any, Any]) -> Any:
    return next((key for key, value in output.items() if _breakable(value)), None)
