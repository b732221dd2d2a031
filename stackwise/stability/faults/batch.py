"""Batches of any shape: the tensors in one by name, and the batch with another tensor in place of one."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor

__all__ = ["described", "parts_of", "with_part"]

Batch = Any


def parts_of(batch: Batch) -> dict[str, Tensor]:
    """By name: keys and numbers, joined by dots; "" where the batch is a tensor."""
    return dict(_parts(batch, ""))


def _parts(batch: Batch, prefix: str) -> Iterator[tuple[str, Tensor]]:
    if isinstance(batch, Tensor):
        yield prefix, batch
    elif isinstance(batch, Mapping):
        for key, value in batch.items():
            yield from _parts(value, f"{prefix}.{key}" if prefix else str(key))
    elif isinstance(batch, tuple | list):
        for number, value in enumerate(batch):
            yield from _parts(value, f"{prefix}.{number}" if prefix else str(number))


def with_part(batch: Batch, name: str, tensor: Tensor) -> Batch:
    """A batch with `tensor` at that name; what is around it is copied, what is beside it is not."""
    return _with(batch, "", name, tensor)


def _with(batch: Batch, prefix: str, name: str, tensor: Tensor) -> Batch:
    if prefix == name and isinstance(batch, Tensor):
        return tensor
    if isinstance(batch, Mapping):
        changed: Any = copy.copy(batch)
        for key, value in batch.items():
            inner = f"{prefix}.{key}" if prefix else str(key)
            if inner == name or name.startswith(inner + "."):
                changed[key] = _with(value, inner, name, tensor)
        return changed
    if isinstance(batch, tuple | list):
        values = [
            _with(value, f"{prefix}.{number}" if prefix else str(number), name, tensor)
            for number, value in enumerate(batch)
        ]
        if hasattr(batch, "_fields"):
            return type(batch)(*values)
        return type(batch)(values)
    return batch


def described(batch: Batch) -> str:
    """What is in it, for messages."""
    parts = parts_of(batch)
    if not parts:
        return f"a {type(batch).__name__} without tensors"
    return ", ".join(
        f"{name or 'a tensor'} ({str(t.dtype).removeprefix('torch.')})" for name, t in parts.items()
    )
