"""Tensors in batches and outputs of any structure: listed by name, or one of them replaced."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from stackwise.support.tensor_tree import leaves

__all__ = ["described", "first_tensor", "parts_of", "with_first", "with_part"]

Batch = Any


def parts_of(batch: Batch) -> dict[str, Tensor]:
    """Return the tensors of a batch by name.

    A name consists of keys and indices, joined by dots. It is "" if the batch itself is a tensor.
    """
    return {".".join(map(str, path)): tensor for path, tensor in leaves(batch).items()}


def with_part(batch: Batch, name: str, tensor: Tensor) -> Batch:
    """Return a batch with `tensor` at that name.

    The containers around it are copied, other tensors are not.
    """
    if not name:
        return tensor
    changed = {}
    for key, value in batch.items() if isinstance(batch, Mapping) else enumerate(batch):
        rest = name.removeprefix(str(key))
        if rest != name and rest[:1] in ("", "."):
            changed[key] = with_part(value, rest[1:], tensor)
    if isinstance(batch, Mapping):
        other: Any = copy.copy(batch)
        for key, value in changed.items():
            other[key] = value
        return other
    values = [changed.get(index, value) for index, value in enumerate(batch)]
    return type(batch)(*values) if hasattr(batch, "_fields") else type(batch)(values)


def first_tensor(output: Any) -> Tensor | None:
    """Return the floating-point tensor that can be broken in a module's output, or None."""
    if isinstance(output, tuple | list):
        output = output[0] if output else None
    elif isinstance(output, Mapping):
        output = next(filter(_is_breakable, output.values()), None)
    return output if _is_breakable(output) else None


def with_first(output: Any, tensor: Tensor) -> Any:
    """Return a copy of the output with `tensor` in the place of its `first_tensor`."""
    before = first_tensor(output)
    return with_part(output, next(name for name, part in parts_of(output).items() if part is before), tensor)


def _is_breakable(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point() and value.numel() > 0


def described(batch: Batch) -> str:
    """Return a description of the tensors in a batch, for messages."""
    parts = parts_of(batch)
    if not parts:
        return f"a {type(batch).__name__} without tensors"
    return ", ".join(
        f"{name or 'a tensor'} ({str(t.dtype).removeprefix('torch.')})" for name, t in parts.items()
    )
