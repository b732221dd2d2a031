"""Tensors in a batch of any structure: listed by name, or one of them replaced."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor

__all__ = ["described", "parts_of", "with_part"]

Batch = Any


def parts_of(batch: Batch) -> dict[str, Tensor]:
    """Return the tensors of a batch by name.

    A name consists of keys and indices, joined by dots. It is "" if the batch itself is a tensor.
    """
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
    """Return a batch with `tensor` at that name.

    The containers around it are copied, other tensors are not.
    """
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
    """Return a description of the tensors in a batch, for messages."""
    parts = parts_of(batch)
    if not parts:
        return f"a {type(batch).__name__} without tensors"
    return ", ".join(
        f"{name or 'a tensor'} ({str(t.dtype).removeprefix('torch.')})" for name, t in parts.items()
    )
