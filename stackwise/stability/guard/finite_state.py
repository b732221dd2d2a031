"""FiniteState: finds parameters and optimizer state that became non-finite."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from typing import Any

from torch import Tensor, distributed, nn
from torch.nn.parameter import is_lazy

from stackwise.stability.non_finite import examinable, non_finite
from stackwise.support.optimizer_state import optimizers_in, parameters_of, states_of
from stackwise.support.tensor_tree import leaves

__all__ = ["FiniteState"]


class FiniteState:
    """Examination of parameters and optimizer state, in all processes together.

    Parameters that are not finite at the first step, such as a mask that is a parameter, are not examined.
    The same holds for states that are not finite after the update that created them, such as a minimum that
    starts at infinity, and for states that are a single number.

    Args:
        model: model whose parameters are examined.
        optimizers: optimizers whose states are examined, and those of their parameters that the model does
            not have.
        group: processes that train together. None: this process only.
    """

    def __init__(
        self, model: nn.Module, optimizers: Sequence[Any], group: distributed.ProcessGroup | None
    ) -> None:
        self._model, self._optimizers, self._group = model, optimizers, group
        self._noted: set[str] = set()
        self._usual: list[tuple[list[str], Tensor]] = []
        self._size = -1  # size of all states when they were last noted

    def begin(self) -> None:
        """Note before an update which new parameters and states are not finite. The host does not wait."""
        states = (getattr(each, "state", None) for o in self._optimizers for each in optimizers_in(o))
        size = sum(_size(state) for state in states if isinstance(state, Mapping))
        if size == self._size:
            return
        self._size = size
        both = chain(self._parameters(), self._states())
        new = {name: tensor for name, tensor in both if name not in self._noted}
        if new:
            self._noted |= new.keys()
            self._usual.append((list(new), non_finite(list(new.values()))))

    def broken(self) -> tuple[list[str], list[str]]:
        """Return the names of parameters and of optimizer states that are not finite. The host waits."""
        self.begin()
        noted = (zip(names, flags.tolist(), strict=True) for names, flags in self._usual)
        usual = {name for name, flag in chain.from_iterable(noted) if flag}
        parameters = [name for name in _named_non_finite(self._parameters()) if name not in usual]
        states = [name for name in _named_non_finite(self._states()) if name not in usual]
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
                for path, tensor in leaves(value, (owner,)).items():
                    part = examinable(tensor.detach()) if tensor.ndim else None
                    if part is not None:
                        yield ".".join(map(str, path)), part


def _size(state: Mapping[Any, Any]) -> int:
    return len(state) + sum(len(value) for value in state.values() if isinstance(value, dict))


def _named_non_finite(named: Iterator[tuple[str, Tensor]]) -> list[str]:
    pairs = list(named)
    if not pairs:
        return []
    flags = non_finite([tensor for _, tensor in pairs]).tolist()
    return [name for (name, _), flag in zip(pairs, flags, strict=True) if flag]
