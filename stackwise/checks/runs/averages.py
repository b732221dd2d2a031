"""Averages: copies of the weights that a run keeps beside its model, such as an EMA or a target network."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from stackwise.subject.trainer_adapter import JoinedRun
from stackwise.subject.trainer_spec import TrainingRun

__all__ = ["averages_of"]

# Objects between a run and its averages.
_DEPTH = 3
# Share of the parameters of the model that a collection of tensors must cover to count as copies of them.
_SHARE = 0.5


def averages_of(run: TrainingRun) -> dict[str, Tensor]:
    """Return copies of the tensors of all averages, by path.

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
        if isinstance(value, nn.Module):
            tensors = value.state_dict() | _plain_tensors(value)
            if _covers(tensors.values(), shapes) and not any(t.data_ptr() in own for t in tensors.values()):
                found.update({f"{path}.{name}": t.detach().clone() for name, t in tensors.items()})
        elif isinstance(value, Mapping | list | tuple):
            items = list(value.items() if isinstance(value, Mapping) else enumerate(value))
            tensors = {f"{path}.{name}": t for name, t in items if isinstance(t, Tensor)}
            if _covers(tensors.values(), shapes) and not any(t.data_ptr() in own for t in tensors.values()):
                found.update({name: t.detach().clone() for name, t in tensors.items()})
            for name, each in items:
                if not isinstance(each, Tensor):
                    collect(each, f"{path}.{name}", depth + 1)
        elif hasattr(value, "__dict__") and not _is_skipped(value):
            for name, each in vars(value).items():
                collect(each, f"{path}.{name}".removeprefix("."), depth + 1)

    collect(run.run if isinstance(run, JoinedRun) else run, "", 0)
    return found


def _plain_tensors(module: nn.Module) -> dict[str, Tensor]:
    """Return tensors that are neither parameters nor buffers, by path."""
    return {
        f"{name}.{key}".removeprefix("."): value
        for name, each in module.named_modules()
        for key, value in vars(each).items()
        if isinstance(value, Tensor)
    }


def _is_skipped(value: Any) -> bool:
    """Return True for classes, optimizers and objects of torch."""
    is_torch = type(value).__module__.partition(".")[0] == "torch"
    return is_torch or isinstance(value, torch.optim.Optimizer | type)


def _covers(tensors: Iterable[Any], shapes: Counter[torch.Size]) -> bool:
    """Return True if tensors have the shapes of at least half of the parameters."""
    mine = Counter(t.shape for t in tensors if isinstance(t, Tensor) and t.is_floating_point())
    return sum((mine & shapes).values()) >= max(1, _SHARE * sum(shapes.values()))
