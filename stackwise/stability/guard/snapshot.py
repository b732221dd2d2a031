"""Snapshot: model, optimizer and what goes with them, in memory, to be put back bit for bit.

Parameters, buffers and the optimizer's tensors stay the objects that they are, so that compiled code and
other references to them stay right.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from typing import Any, Protocol, cast

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from stackwise.argument import require
from stackwise.stability.buffers import elements

__all__ = ["Moment", "Snapshot", "Stateful"]

# What it is; which: a name, or a parameter; of which other object, None: of the model or the optimizer; and
# of state its key.
_Key = tuple[Any, ...]


class Stateful(Protocol):
    """What has a state to be taken and put back."""

    def state_dict(self) -> Mapping[str, Any]:
        """The state."""

    def load_state_dict(self, state_dict: Any) -> Any:
        """Go on from it."""


class Moment:
    """What the host knows beside tensors: options of the optimizer, scheduler, other objects. A copy.

    Args:
        optimizer: whose groups.
        scheduler: None: there is none.
        others: of further objects by name; of modules and optimizers only what no `Snapshot` has.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        scheduler: Stateful | None,
        others: Mapping[str, Stateful] | None = None,
    ) -> None:
        self._options = _options_of(optimizer)
        self._scheduler = None if scheduler is None else copy.deepcopy(dict(scheduler.state_dict()))
        self._others: dict[str, dict[str, Any]] = {}
        self._others_options: dict[str, dict[nn.Parameter, dict[str, Any]]] = {}
        for name, other in (others or {}).items():
            if not _is_tensors(other):
                self._others[name] = copy.deepcopy(dict(other.state_dict()))
            elif isinstance(other, torch.optim.Optimizer):
                self._others_options[name] = _options_of(other)

    def restore(
        self,
        optimizer: torch.optim.Optimizer,
        scheduler: Stateful | None,
        others: Mapping[str, Stateful] | None = None,
    ) -> None:
        """Put everything back. Groups that the optimizer did not have yet stay as they are."""
        if scheduler is not None and self._scheduler is not None:
            scheduler.load_state_dict(copy.deepcopy(self._scheduler))
        for name, other in (others or {}).items():
            if name in self._others:
                other.load_state_dict(copy.deepcopy(self._others[name]))
        # Behind schedulers: what loading them does to the rates is undone.
        _put_options(optimizer, self._options)
        for name, options in self._others_options.items():
            if others and name in others:
                _put_options(cast("torch.optim.Optimizer", others[name]), options)


class Snapshot:
    """A copy of all tensors that a training run changes; taken again, it is written over.

    It holds as many bytes as they do, and no more while it is taken. On CUDA nothing waits for the copies
    that `take` begins. Of sharded tensors (DTensor) the shard of this process is kept.

    Args:
        model: parameters and buffers.
        optimizer: its state of every parameter.
        others: by name; of those that are modules and optimizers the same.
        on_host: keep the copies in host memory, pinned where the model is on CUDA.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        others: Mapping[str, Stateful] | None = None,
        *,
        on_host: bool = True,
    ) -> None:
        self._model, self._optimizer, self._on_host = model, optimizer, on_host
        self._others = dict(others or {})
        self._modules: dict[str | None, nn.Module] = {None: model}
        self._optimizers: dict[str | None, torch.optim.Optimizer] = {None: optimizer}
        self._kept: dict[_Key, Any] = {}

    @property
    def nbytes(self) -> int:
        """Bytes that are held."""
        tensors = [value for value in self._kept.values() if isinstance(value, Tensor)]
        return sum(tensor.numel() * tensor.element_size() for tensor in tensors)

    @torch.no_grad()
    def take(self) -> None:
        """Copy everything as it is now."""
        self._modules, self._optimizers = {None: self._model}, {None: self._optimizer}
        for name, other in self._others.items():
            if not _is_tensors(other):
                continue
            if isinstance(other, nn.Module):
                self._modules[name] = other
            elif isinstance(other, torch.optim.Optimizer):
                self._optimizers[name] = other
        values = dict(self._values())
        # What is no more gives its place up before anything is added.
        self._kept = {key: value for key, value in self._kept.items() if key in values}
        for key, value in values.items():
            self._kept[key] = self._copied(value, self._kept.get(key))

    @torch.no_grad()
    def restore(self) -> None:
        """Put everything back, in place. State that the optimizer did not have yet is dropped.

        Parameters and buffers that came since are left as they are. So are buffers of another shape than they
        had: they were computed for a longer input.

        Raises:
            ValueError: a parameter of another shape than it had; nothing was put back then.
        """
        assert self._kept, "take() first"
        known = [
            (key, _local(tensor), self._kept[key]) for key, tensor in self._tensors() if key in self._kept
        ]
        for (what, which, of), tensor, kept in known:
            fits = what == "buffer" or tensor.shape == kept.shape
            called = f"{what} {which}" if isinstance(which, str) else f"{what} of the optimizer"
            called = called if of is None else f"{called} of {of}"
            require(fits, called, tuple(tensor.shape), f"{tuple(kept.shape)}, as it was")
        for _, tensor, kept in known:
            if tensor.shape == kept.shape:
                tensor.copy_(kept, non_blocking=True)
        for of, optimizer in self._optimizers.items():
            self._restore_state(of, optimizer)

    def _restore_state(self, of: str | None, optimizer: torch.optim.Optimizer) -> None:
        states: dict[nn.Parameter, dict[Any, Any]] = {}
        for (what, which, other, *rest), value in self._kept.items():
            if what == "optimizer" and other == of:
                states.setdefault(which, {})[rest[0]] = value
        state = optimizer.state
        for p in _parameters(optimizer):
            kept = states.get(p, {})
            if not kept:
                state.pop(p, None)
                continue
            mine = state[p]
            for key in [key for key in mine if key not in kept]:
                del mine[key]
            for key, value in kept.items():
                own = mine.get(key)
                if not isinstance(value, Tensor):
                    mine[key] = copy.deepcopy(value)
                elif isinstance(own, Tensor) and _local(own).shape == value.shape:
                    _local(own).copy_(value, non_blocking=True)
                else:
                    mine[key] = value.to(p.device, copy=True)

    def _values(self) -> Iterator[tuple[_Key, Any]]:
        yield from self._tensors()
        for of, optimizer in self._optimizers.items():
            for p in _parameters(optimizer):
                if p in optimizer.state:
                    for key, value in optimizer.state[p].items():
                        yield ("optimizer", p, of, key), value

    def _tensors(self) -> Iterator[tuple[_Key, Tensor]]:
        seen = set()
        for of, module in self._modules.items():
            for name, p in module.named_parameters():
                if id(p) not in seen:
                    seen.add(id(p))
                    yield ("parameter", name, of), elements(p)
            for name, buffer in module.named_buffers():
                yield ("buffer", name, of), elements(buffer)
        for p in _parameters(self._optimizer):
            if id(p) not in seen:
                yield ("parameter", p, None), elements(p)

    def _copied(self, value: Any, place: Any) -> Any:
        if not isinstance(value, Tensor):
            return copy.deepcopy(value)
        value = _local(value.detach())
        fits = isinstance(place, Tensor) and place.shape == value.shape and place.dtype == value.dtype
        if not fits:
            on_host = self._on_host and value.device.type != "cpu"
            device = torch.device("cpu") if on_host else value.device
            pinned = on_host and value.device.type == "cuda"
            place = torch.empty(value.shape, dtype=value.dtype, device=device, pin_memory=pinned)
        place.copy_(value, non_blocking=True)
        return place


def _local(tensor: Tensor) -> Tensor:
    """The shard of this process; a tensor that is not sharded itself."""
    local: Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return local


def _parameters(optimizer: torch.optim.Optimizer) -> list[nn.Parameter]:
    return [p for group in optimizer.param_groups for p in group["params"]]


def _options_of(optimizer: torch.optim.Optimizer) -> dict[nn.Parameter, dict[str, Any]]:
    """By the parameters of each group: groups come and go, and others may join one in front."""
    return {
        p: options
        for group in optimizer.param_groups
        if (options := _options(group))
        for p in group["params"]
    }


def _put_options(
    optimizer: torch.optim.Optimizer, options_of: Mapping[nn.Parameter, Mapping[str, Any]]
) -> None:
    for group in optimizer.param_groups:
        kept = group["params"]
        options = next((options_of[p] for p in kept if p in options_of), None)
        if options is None:
            continue
        group.clear()
        group["params"] = kept
        group.update(_options(options))


def _options(group: Mapping[str, Any]) -> dict[str, Any]:
    return {
        key: value.clone() if isinstance(value, Tensor) else copy.deepcopy(value)
        for key, value in group.items()
        if key != "params"
    }


def _is_tensors(other: Stateful) -> bool:
    """Whether what a module or an optimizer has is in the tensors, and options, that a `Snapshot` knows of.

    `Optimizer.load_state_dict` gives state the dtype of its parameter, and so rounds what is wider.
    """
    if isinstance(other, nn.Module):
        named = dict(other.named_parameters(remove_duplicate=False))
        held = named | dict(other.named_buffers(remove_duplicate=False))
        return other.state_dict().keys() <= held.keys() and all(map(_is_plain, held.values()))
    if isinstance(other, torch.optim.Optimizer):
        values = [value for state in other.state.values() for value in state.values()]
        return (
            other.state_dict().keys() == {"state", "param_groups"}
            and other.state.keys() <= set(_parameters(other))
            and all(_is_plain(value) for value in values if isinstance(value, Tensor))
        )
    return False


def _is_plain(tensor: Tensor) -> bool:
    """Whether it, or its shard, is one piece of memory."""
    around_others = hasattr(tensor, "__tensor_flatten__") and not hasattr(tensor, "to_local")
    return not is_lazy(tensor) and tensor.layout is torch.strided and not around_others
