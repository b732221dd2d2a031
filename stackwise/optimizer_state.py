"""Optimizer state: the optimizers inside an optimizer, and the parameters that they train together.

A container such as `self.optimizers = [Muon(...), AdamW(...)]`, a wrapper such as accelerate's
`AcceleratedOptimizer`, or Lookahead around another optimizer has an empty or partial `state` of its own.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["optimizers_in", "parameters_of", "states_of"]

# Attributes of every torch optimizer that hold tensors and options, never an optimizer.
_OWN = frozenset({"state", "param_groups", "defaults"})


def optimizers_in(optimizer: Any) -> list[Any]:
    """Return `optimizer` and every optimizer in its attributes, the innermost ones first.

    Lists, tuples and dictionaries in attributes are searched too, other objects are not. An optimizer is a
    `torch.optim.Optimizer`, or any object with `param_groups` and `step()`.
    """
    found: dict[int, Any] = {id(optimizer): optimizer}
    places = deque(_attributes(optimizer))
    seen: set[int] = set()
    while places:
        place = places.popleft()
        if id(place) in found or id(place) in seen:
            continue
        if isinstance(place, Mapping):
            seen.add(id(place))
            places.extend(place.values())
        elif isinstance(place, list | tuple):
            seen.add(id(place))
            places.extend(place)
        elif _is_optimizer(place):
            found[id(place)] = place
            places.extend(_attributes(place))
    return list(reversed(found.values()))


def parameters_of(optimizer: Any) -> list[nn.Parameter]:
    """Return the parameters of all groups of `optimizer` and of the optimizers in it, each once."""
    found: dict[int, nn.Parameter] = {}
    for each in reversed(optimizers_in(optimizer)):
        for group in each.param_groups:
            for parameter in group["params"]:
                found.setdefault(id(parameter), parameter)
    return list(found.values())


def states_of(optimizer: Any) -> Iterator[tuple[Any, Any, Any]]:
    """Yield (optimizer, key, value) of every entry of every `state`, each value once.

    If the `state` of a container contains entries of an inner optimizer, they are yielded with the inner
    optimizer only.
    """
    seen: set[int] = set()
    for each in optimizers_in(optimizer):
        state = getattr(each, "state", None)
        if not isinstance(state, Mapping):
            continue
        for key, value in state.items():
            if isinstance(value, Tensor | Mapping | list):
                if id(value) in seen:
                    continue
                seen.add(id(value))
            yield each, key, value


def _attributes(optimizer: Any) -> list[Any]:
    return [value for name, value in getattr(optimizer, "__dict__", {}).items() if name not in _OWN]


def _is_optimizer(place: Any) -> bool:
    if isinstance(place, torch.optim.Optimizer):
        return True
    if isinstance(place, Tensor | nn.Module | type):
        return False
    return hasattr(place, "param_groups") and callable(getattr(place, "step", None))
