"""FiniteState: which parameters and which optimizer state are not finite any more."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.nn.parameter import is_lazy

from stackwise.optimizer_state import parameters_of, states_of
from stackwise.stability.non_finite import examinable, non_finite

__all__ = ["FiniteState"]


class FiniteState:
    """Examines parameters and optimizer state, in all processes together.

    Parameters that are not finite at the first step, such as a mask that is a parameter, are left out. So are
    states that are a single number.

    Args:
        model: its parameters.
        optimizers: their states, and parameters of theirs that the model does not have.
        group: processes that train together. None: this one alone.
    """

    def __init__(
        self, model: nn.Module, optimizers: Sequence[Any], group: distributed.ProcessGroup | None
    ) -> None:
        self._model, self._optimizers, self._group = model, optimizers, group
        self._usual: tuple[list[str], Tensor] | None = None

    def begin(self) -> None:
        """Note before the first update which parameters are not finite. The host does not wait."""
        if self._usual is None:
            named = dict(self._parameters())
            flags = non_finite(list(named.values())) if named else torch.zeros(0, dtype=torch.bool)
            self._usual = list(named), flags

    def broken(self) -> tuple[list[str], list[str]]:
        """Return the names of parameters and of optimizer states that are not finite. The host waits."""
        usual: set[str] = set()
        if self._usual is not None:
            usual = {name for name, flag in zip(*_read(self._usual), strict=True) if flag}
        parameters = [name for name in _named_non_finite(self._parameters()) if name not in usual]
        states = _named_non_finite(self._states())
        if self._group is None:
            return parameters, states
        everyone: list[Any] = [None] * distributed.get_world_size(self._group)
        distributed.all_gather_object(everyone, (parameters, states), self._group)
        both = (dict.fromkeys(name for each in everyone for name in each[place]) for place in (0, 1))
        return tuple(map(list, both))  # type: ignore[return-value]

    def _named(self) -> dict[str, nn.Parameter]:
        found = dict(self._model.named_parameters())
        known = {id(p) for p in found.values()}
        for number, optimizer in enumerate(self._optimizers):
            for index, p in enumerate(parameters_of(optimizer)):
                if id(p) not in known:
                    known.add(id(p))
                    found[f"parameter {index} of optimizer {number}"] = p
        return found

    def _parameters(self) -> Iterator[tuple[str, Tensor]]:
        for name, p in self._named().items():
            tensor = None if is_lazy(p) else examinable(p.detach())
            if tensor is not None:
                yield name, tensor

    def _states(self) -> Iterator[tuple[str, Tensor]]:
        names = {id(p): name for name, p in self._named().items()}
        for optimizer in self._optimizers:
            for _, key, value in states_of(optimizer):
                owner = names.get(id(key), "a parameter") if isinstance(key, Tensor) else str(key)
                for path, tensor in _tensors(value):
                    part = examinable(tensor.detach()) if tensor.ndim else None
                    if part is not None:
                        yield ".".join((owner, *path)), part


def _read(noted: tuple[list[str], Tensor]) -> tuple[list[str], list[bool]]:
    names, flags = noted
    return names, flags.tolist()


def _named_non_finite(named: Iterator[tuple[str, Tensor]]) -> list[str]:
    pairs = list(named)
    if not pairs:
        return []
    flags = non_finite([tensor for _, tensor in pairs]).tolist()
    return [name for (name, _), flag in zip(pairs, flags, strict=True) if flag]


def _tensors(value: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Tensor]]:
    if isinstance(value, Tensor):
        yield path, value
    elif isinstance(value, Mapping):
        for key, each in value.items():
            yield from _tensors(each, (*path, str(key)))
    elif isinstance(value, list | tuple):
        for index, each in enumerate(value):
            yield from _tensors(each, (*path, str(index)))
