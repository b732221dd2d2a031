"""Tensors and rows of a batch, which may be a tensor or nested mappings, lists, tuples and outputs of models.

Shapes: n rows of a batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import is_dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

__all__ = ["joined", "mapped", "named_tensors", "rows_of", "tensors_in"]


def named_tensors(batch: Any, name: str = "batch") -> Iterator[tuple[str, Tensor]]:
    """Yield each tensor with its path."""
    if isinstance(batch, Tensor):
        yield name, batch
    elif isinstance(batch, Mapping):
        for key, value in batch.items():
            yield from named_tensors(value, str(key) if name == "batch" else f"{name}.{key}")
    elif isinstance(batch, list | tuple):
        for index, value in enumerate(batch):
            yield from named_tensors(value, f"{name}[{index}]")
    elif isinstance(batch, SimpleNamespace) or is_dataclass(batch) or hasattr(batch, "logits"):
        yield from named_tensors(_attributes(batch), name)


def _attributes(output: Any) -> dict[str, Any]:
    """Return the attributes of an output of a model, which may have slots."""
    slots = [name for kind in type(output).__mro__ for name in getattr(kind, "__slots__", ())]
    return {name: getattr(output, name) for name in slots if hasattr(output, name)} | getattr(
        output, "__dict__", {}
    )


def tensors_in(batch: Any) -> Iterator[Tensor]:
    """Yield each tensor."""
    return (tensor for _, tensor in named_tensors(batch))


def mapped(function: Callable[..., Tensor], *batches: Any) -> Any:
    """Apply a function to the tensors at each place of batches of one structure.

    Other values are copied from the first batch. Mappings become dictionaries.
    """
    first = batches[0]
    if isinstance(first, Tensor):
        return function(*batches)
    if isinstance(first, Mapping):
        return {key: mapped(function, *(batch[key] for batch in batches)) for key in first}
    if isinstance(first, list | tuple):
        parts = [mapped(function, *each) for each in zip(*batches, strict=True)]
        return type(first)(*parts) if hasattr(first, "_fields") else type(first)(parts)
    return first


def rows_of(batch: Any, n: int, index: slice | Tensor) -> Any:
    """Return the rows `index` of a batch of n rows. Tensors without rows stay unchanged."""

    def some(tensor: Tensor) -> Tensor:
        at = index.to(tensor.device) if isinstance(index, Tensor) else index
        return tensor[at] if tensor.ndim and len(tensor) == n else tensor

    return mapped(some, batch)


def joined(batches: Sequence[Any], n: int) -> Any:
    """Concatenate batches of n rows each. Tensors without rows are copied from the first."""
    return mapped(
        lambda *parts: torch.cat(parts) if parts[0].ndim and len(parts[0]) == n else parts[0], *batches
    )
