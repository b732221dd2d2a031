"""Averages: copies of the weights that a run has outside its model, such as an EMA or a target network."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from stackwise.subject.trainer_adapter import JoinedRun
from stackwise.subject.trainer_spec import TrainingRun

__all__ = ["averages_in", "averages_of"]

# Depth of the search: attributes of attributes of the run.
_DEPTH = 3
# Least share of the parameters of the model whose shapes the tensors of an average have.
_SHARE = 0.5


def averages_of(run: TrainingRun) -> dict[str, Tensor]:
    """Return copies of the tensors of all averages, by path."""
    return {path: tensor.detach().clone() for path, tensor in averages_in(run).items()}


def averages_in(run: TrainingRun) -> dict[str, Tensor]:
    """Return the tensors of all averages, by path.

    An average is another module, or a list or dict of tensors, with the shapes of at least half of the
    parameters of the model, that shares no memory with them.
    """
    seen = {id(each) for each in run.model.modules()}
    found: dict[str, Tensor] = {}
    shapes = Counter(p.shape for p in run.model.parameters())
    own = {p.data_ptr() for p in run.model.parameters()}

    def collect(value: Any, path: str, depth: int) -> None:
        if id(value) in seen or depth > _DEPTH:
            return
        seen.add(id(value))
        items = list(_items_of(value))
        tensors = {f"{path}.{name}": each for name, each in items if isinstance(each, Tensor)}
        is_collection = isinstance(value, nn.Module | Mapping | list | tuple)
        is_copy = own.isdisjoint(each.data_ptr() for each in tensors.values())
        if is_collection and is_copy and _covers(tensors.values(), shapes):
            found.update(tensors)
        if not isinstance(value, nn.Module):
            for name, each in items:
                collect(each, f"{path}.{name}".removeprefix("."), depth + 1)

    collect(run.run if isinstance(run, JoinedRun) else run, "", 0)
    return found


def _items_of(value: Any) -> Iterable[tuple[Any, Any]]:
    """Return the tensors of a module, the items of a collection, or the attributes of another object."""
    if isinstance(value, nn.Module):
        saved: dict[str, Any] = value.state_dict(keep_vars=True)
        return [*saved.items(), *_plain_tensors(value).items()]
    if isinstance(value, Mapping):
        return value.items()
    if isinstance(value, list | tuple):
        return enumerate(value)
    is_torch = type(value).__module__.partition(".")[0] == "torch"
    if is_torch or isinstance(value, torch.optim.Optimizer | type) or not hasattr(value, "__dict__"):
        return ()
    return [*vars(value).items()]


def _plain_tensors(module: nn.Module) -> dict[str, Tensor]:
    """Return tensors that are neither parameters nor buffers, by path."""
    return {
        f"{name}.{key}".removeprefix("."): value
        for name, each in module.named_modules()
        for key, value in vars(each).items()
        if isinstance(value, Tensor)
    }


def _covers(tensors: Iterable[Tensor], shapes: Counter[torch.Size]) -> bool:
    """Return True if tensors have the shapes of at least half of the parameters."""
    mine = Counter(each.shape for each in tensors if each.is_floating_point())
    return sum((mine & shapes).values()) >= max(1, _SHARE * sum(shapes.values()))
