"""Tensor tree: the tensors in nested containers, such as arguments, outputs and states."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor
from torch.utils import _pytree

__all__ = ["LEVELS", "Path", "leaves", "shown_path", "tensors_of", "too_deep"]

Path = tuple[Any, ...]

LEVELS = 64  # a level needs up to four nested calls; Python and its JSON reader allow about 1000
_SHOWN = 8  # keys of a path in an error


def tensors_of(tree: object) -> list[Tensor]:
    """Return the tensors in nested containers, in order."""
    return [leaf for leaf in _pytree.tree_leaves(tree) if isinstance(leaf, Tensor)]


def leaves(tree: Any, path: Path = ()) -> dict[Path, Tensor]:
    """Return every tensor in nested mappings, lists and tuples by its path.

    Raises:
        ValueError: more than 64 levels, for example a tree that contains itself. The error names the path.
    """
    if isinstance(tree, Tensor):
        return {path: tree}
    items: Any = ()
    if isinstance(tree, Mapping):
        items = tree.items()
    elif isinstance(tree, list | tuple):
        items = enumerate(tree)
    if len(path) > LEVELS and items:
        raise too_deep(path)
    return {place: leaf for key, value in items for place, leaf in leaves(value, (*path, key)).items()}


def too_deep(path: Path) -> ValueError:
    """Return the error for a tree with more than 64 levels."""
    allowed = f"at most {LEVELS} levels; a state must not contain itself"
    return ValueError(f"{shown_path(path)}: got a state with too many levels; allowed: {allowed}")


def shown_path(path: Path) -> str:
    """Return a path as printable text for an error. A long path is cut off."""
    keys = ["[...]" if isinstance(key, Tensor) else str(key)[:80] for key in path[:_SHOWN]]
    text = ".".join([*keys, *(["..."] if len(path) > _SHOWN else [])])
    return text.encode("utf-8", "backslashreplace").decode()  # a terminal refuses half of a surrogate pair
