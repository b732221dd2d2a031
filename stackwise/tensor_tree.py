"""Tensor tree: the tensors in what a call takes or gives, however it is nested."""

from __future__ import annotations

from torch import Tensor
from torch.utils import _pytree

__all__ = ["tensors_of"]


def tensors_of(tree: object) -> list[Tensor]:
    """The tensors in nested containers, in their order."""
    return [leaf for leaf in _pytree.tree_leaves(tree) if isinstance(leaf, Tensor)]
