"""Autograd graph of a loss: check if its backward pass reaches given parameters."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor

__all__ = ["reaches"]


def reaches(roots: Iterable[Tensor], parameters: Iterable[Tensor]) -> bool:
    """Return True if a gradient of `roots` flows into one of `parameters`.

    Always return True for sharded parameters.
    """
    parameters = tuple(parameters)
    if any(hasattr(p, "_local_tensor") for p in parameters):
        return True  # the graph contains gathered copies of them
    wanted = {id(p) for p in parameters}
    roots = tuple(roots)
    if any(id(root) in wanted for root in roots):
        return True
    open_nodes: list[Any] = [root.grad_fn for root in roots if root.grad_fn is not None]
    known = set(open_nodes)
    while open_nodes:
        node = open_nodes.pop()
        if id(getattr(node, "variable", None)) in wanted:
            return True
        for following, _ in node.next_functions:
            if following is not None and following not in known:
                known.add(following)
                open_nodes.append(following)
    return False
