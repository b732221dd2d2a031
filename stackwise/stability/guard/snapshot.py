"""Snapshot: copies of model, optimizer, scheduler and other objects in memory, restored bit for bit.

Parameters, buffers and the optimizer's tensors stay the same objects, so that compiled code and other
references to them stay valid.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, MutableMapping
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.utils import _pytree

from stackwise.stability.buffers import elements
from stackwise.support.arguments import require
from stackwise.support.optimizer_state import (
    check_kept,
    is_optimizer,
    optimizers_in,
    own_state_of,
    parameters_of,
    states_of,
)
from stackwise.support.tensor_tree import leaves

__all__ = ["Moment", "Snapshot", "Stateful", "check_restorable", "check_states"]

# Kind; name, parameter or key of a state; owner: the name in `others`, None for the model itself, or the id
# of an optimizer.
_Key = tuple[str, Any, Any]


class Stateful(Protocol):
    """Object whose state can be saved and restored."""

    def state_dict(self) -> Mapping[str, Any]:
        """Return the state."""

    def load_state_dict(self, state_dict: Any) -> Any:
        """Restore the state."""


def check_restorable(optimizer: Any, scheduler: Any, others: Mapping[str, Any]) -> None:
    """Refuse objects whose state no rewind could restore.

    Raises:
        ValueError: several optimizers instead of one; an optimizer without `param_groups` or `step()`, or
            with neither a `state` nor `state_dict()` and `load_state_dict()`; a scheduler or other object
            without these two; optimizer state that `check_states` refuses.
    """
    several = isinstance(optimizer, list | tuple | Mapping)
    allowed = "one optimizer; the others go into others={name: optimizer}, or all into one object"
    require(not several, "optimizer", f"a {type(optimizer).__name__} of optimizers", allowed)
    kind = type(optimizer).__name__
    require(is_optimizer(optimizer), "optimizer", kind, "an object with param_groups, step() and zero_grad()")
    restorable = _is_stateful(optimizer) or any(
        isinstance(getattr(each, "state", None), Mapping) for each in optimizers_in(optimizer)
    )
    allowed = "one with a state, or state_dict() and load_state_dict(), or optimizers in its attributes"
    require(restorable, "optimizer", kind, allowed)
    objects = {f"others[{name!r}]": other for name, other in others.items()}
    for key, each in (objects if scheduler is None else {"scheduler": scheduler, **objects}).items():
        allowed = "an object with state_dict() and load_state_dict()"
        require(_is_stateful(each), key, type(each).__name__, allowed)
    check_states(optimizer, others, is_fresh=True)


def check_states(optimizer: Any, others: Mapping[str, Any], *, is_fresh: bool = False) -> None:
    """Refuse optimizer state that a rewind would lose, or that contains itself.

    `is_fresh`: see `check_kept`.

    Raises:
        ValueError: see `check_kept` and `leaves`.
    """
    named = {"optimizer": optimizer, **{f"others[{name!r}]": other for name, other in others.items()}}
    for key, each in named.items():
        if is_optimizer(each):
            leaves([value for _, _, value in states_of(each)], (key, "state"))
            own = [own_state_of(inner) for inner in optimizers_in(each)]
            saved = leaves(own, (key, "state_dict()")).values()
            check_kept(key, each, saved, "a rewind", is_fresh=is_fresh)


class Moment:
    """Copy of the state that is not in tensors: options of optimizers, scheduler, other objects.

    Args:
        optimizer: optimizer whose group options are copied, including optimizers inside it.
        scheduler: scheduler; None: no scheduler.
        others: further objects by name. Of modules and optimizers, only state that no `Snapshot` has is
            copied.
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
        for name, other in (others or {}).items():
            if is_optimizer(other):
                self._options |= _options_of(other)
            elif not _is_tensors(other):
                self._others[name] = copy.deepcopy(dict(other.state_dict()))

    def restore(
        self,
        optimizer: torch.optim.Optimizer,
        scheduler: Stateful | None,
        others: Mapping[str, Stateful] | None = None,
    ) -> None:
        """Restore everything. Groups that an optimizer did not have yet stay unchanged."""
        if scheduler is not None and self._scheduler is not None:
            scheduler.load_state_dict(copy.deepcopy(self._scheduler))
        for name, other in (others or {}).items():
            if name in self._others:
                other.load_state_dict(copy.deepcopy(self._others[name]))
        # After the schedulers: loading one may change the learning rates.
        for each in (optimizer, *(others or {}).values()):
            if is_optimizer(each):
                _put_options(each, self._options)


class Snapshot:
    """Copy of all tensors that training changes. Every `take` overwrites the previous copy.

    It needs as many bytes as these tensors, also during `take`. On CUDA, no operation waits for the copies
    that `take` starts. For a sharded tensor (DTensor), the shard of this process is copied.

    The state of an optimizer is its `state`, the `state` of every optimizer inside it (see `optimizers_in`),
    and any further state that the `state_dict()` of one of them returns.

    Args:
        model: model with its parameters, buffers, and extra state of modules (`get_extra_state`).
        optimizer: optimizer with its state, and parameters of its groups that the model does not have.
        others: further objects by name. Modules and optimizers among them are copied in the same way.
        on_host: keep the copies in host memory, pinned if the model is on CUDA.
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
        self._optimizers: dict[str | None, Any] = {None: optimizer}
        self._kept: dict[_Key, Any] = {}
        self._extra: list[_Extra] = []

    @property
    def nbytes(self) -> int:
        """Size of the copies in bytes."""
        copies = (each.tensor for each in _flat(self._kept)[0] if isinstance(each, _Copy))
        return sum(tensor.nbytes for tensor in copies)

    @torch.no_grad()
    def take(self) -> None:
        """Copy the current state.

        Raises:
            ValueError: optimizer state that `check_states` refuses.
        """
        check_states(self._optimizer, self._others)
        self._modules, self._optimizers = {None: self._model}, {None: self._optimizer}
        for name, other in self._others.items():
            if is_optimizer(other):
                self._optimizers[name] = other
            elif isinstance(other, nn.Module) and _is_tensors(other):
                self._modules[name] = other
        values = dict(self._values())
        # Outdated copies are freed before new ones are added.
        self._kept = {key: value for key, value in self._kept.items() if key in values}
        for key, value in values.items():
            self._kept[key] = self._copied(value, self._kept.get(key))
        self._extra = []
        for optimizer in self._optimizers.values():
            values_of = [value for _, _, value in states_of(optimizer) if isinstance(value, _CONTAINERS)]
            copied = {id(tensor): tensor for tensor in leaves(values_of).values()}
            for each in optimizers_in(optimizer):
                state = own_state_of(each)
                if state is not None and _has_more(state, copied.keys() | set(map(id, values_of))):
                    # Tensors that are copied already are only referred to.
                    self._extra.append(_Extra(each, copy.deepcopy(state, dict(copied)), copied))

    @torch.no_grad()
    def restore(self) -> None:
        """Restore everything in place. State that the optimizer did not have yet is dropped.

        Parameters and buffers that were added later stay unchanged. Buffers of another shape stay unchanged
        too, because they were computed for a longer input.

        Raises:
            ValueError: a parameter of another shape, or optimizer state that `check_states` refuses. Then no
                object is restored.
        """
        assert self._kept, "take() first"
        check_states(self._optimizer, self._others)
        known = [
            (key, _local(tensor), self._kept[key].tensor)
            for key, tensor in self._tensors()
            if key in self._kept
        ]
        for (what, which, of), tensor, kept in known:
            fits = what == "buffer" or tensor.shape == kept.shape
            called = f"{what} {which}" if isinstance(which, str) else f"{what} of the optimizer"
            called = called if of is None else f"{called} of {of}"
            require(fits, called, tuple(tensor.shape), f"{tuple(kept.shape)}, the shape in the snapshot")
        # First: loading may write into weights, and rounds states to the dtype of their parameters.
        for each, state, referred in self._extra:
            each.load_state_dict(copy.deepcopy(state, dict(referred)))
        for _, tensor, kept in known:
            if tensor.shape == kept.shape:
                tensor.copy_(kept, non_blocking=True)
        for key, module in _with_extra_state(self._modules):
            if key in self._kept:
                module.set_extra_state(_restored(None, self._kept[key]))
        for optimizer in self._optimizers.values():
            self._restore_states(optimizer)

    def _restore_states(self, optimizer: Any) -> None:
        live = {id(p) for p in parameters_of(optimizer)}
        inner = {id(each): each for each in optimizers_in(optimizer)}
        for each, key, _ in list(states_of(optimizer)):
            if ("state", key, id(each)) not in self._kept and isinstance(each.state, MutableMapping):
                each.state.pop(key, None)
        for (what, key, of), kept in self._kept.items():
            # A parameter that has left the groups needs no state.
            if what == "state" and of in inner and (not isinstance(key, Tensor) or id(key) in live):
                state = inner[of].state
                value = _restored(state.get(key), kept)
                if value is not state.get(key):
                    state[key] = value

    def _values(self) -> Iterator[tuple[_Key, Any]]:
        yield from self._tensors()
        for key, module in _with_extra_state(self._modules):
            yield key, module.get_extra_state()
        for optimizer in self._optimizers.values():
            for each, key, value in states_of(optimizer):
                yield ("state", key, id(each)), value

    def _tensors(self) -> Iterator[tuple[_Key, Tensor]]:
        seen = set()
        for of, module in self._modules.items():
            for name, p in module.named_parameters():
                if id(p) not in seen:
                    seen.add(id(p))
                    yield ("parameter", name, of), elements(p)
            for name, buffer in module.named_buffers():
                yield ("buffer", name, of), elements(buffer)
        for of, optimizer in self._optimizers.items():
            for p in parameters_of(optimizer):
                if id(p) not in seen:
                    seen.add(id(p))
                    yield ("parameter", p, of), elements(p)

    def _copied(self, value: Any, earlier: Any) -> Any:
        """Return a copy of `value`, written into `earlier`, the previous copy, where it fits."""
        values, structure = _flat(value)
        places, other = _flat(earlier)
        same = structure == other
        copies = (self._copied_leaf(each, places[i] if same else None) for i, each in enumerate(values))
        return _pytree.tree_unflatten(copies, structure)

    def _copied_leaf(self, value: Any, earlier: Any) -> Any:
        if not isinstance(value, Tensor):
            return copy.deepcopy(value)
        value = _local(value.detach())
        if not _is_plain(value):
            return _Copy(value.clone(), value.device)
        tensor = earlier.tensor if isinstance(earlier, _Copy) else None
        if tensor is None or tensor.shape != value.shape or tensor.dtype != value.dtype:
            on_host = self._on_host and value.device.type != "cpu"
            device = torch.device("cpu") if on_host else value.device
            pinned = on_host and value.device.type == "cuda"
            tensor = torch.empty(value.shape, dtype=value.dtype, device=device, pin_memory=pinned)
        tensor.copy_(value, non_blocking=True)
        return _Copy(tensor, value.device)


@dataclass(frozen=True)
class _Copy:
    """Copy of a tensor, and the device of the original."""

    tensor: Tensor
    device: torch.device


class _Extra(NamedTuple):
    """Copy of the `state_dict()` of an optimizer, and the tensors in it that are not copied, by id."""

    optimizer: Any
    state: Any
    referred: dict[int, Tensor]


_CONTAINERS = (Tensor, Mapping, list)


def _restored(live: Any, kept: Any) -> Any:
    """Return a copy of `kept`. If `live` has the same structure, its tensors are written in place."""
    values, structure = _flat(kept)
    places, other = _flat(live)
    same = structure == other
    restored = [_restored_leaf(places[i] if same else None, each) for i, each in enumerate(values)]
    return _pytree.tree_unflatten(restored, structure)


def _restored_leaf(live: Any, kept: Any) -> Any:
    if not isinstance(kept, _Copy):
        return copy.deepcopy(kept)
    own = _local(live) if isinstance(live, Tensor) else None
    if own is not None and (own.shape, own.dtype) == (kept.tensor.shape, kept.tensor.dtype):
        own.copy_(kept.tensor, non_blocking=True)
        return live
    return kept.tensor.to(kept.device, copy=True)


def _flat(value: Any) -> tuple[list[Any], Any]:
    return _pytree.tree_flatten(value)


def _has_more(state: Any, known: set[int]) -> bool:
    """Return True if a state dict has entries besides group options and objects with `known` ids."""
    if id(state) in known:
        return False
    if isinstance(state, Mapping):
        return any(_has_more(each, known) for key, each in state.items() if key != "param_groups")
    if isinstance(state, list | tuple):
        return any(_has_more(each, known) for each in state)
    return True


def _with_extra_state(modules: Mapping[str | None, nn.Module]) -> Iterator[tuple[_Key, nn.Module]]:
    for of, module in modules.items():
        for name, each in module.named_modules():
            if type(each).get_extra_state is not nn.Module.get_extra_state:
                yield ("extra state", name, of), each


def _local(tensor: Tensor) -> Tensor:
    """Return the shard of this process, or `tensor` itself if it is not sharded."""
    local: Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return local


# Options of an optimizer by parameter, because groups may be added or removed at any position.
_Options = dict[int, dict[nn.Parameter, dict[str, Any]]]


def _options_of(optimizer: Any) -> _Options:
    return {
        id(each): {
            p: options for group in each.param_groups if (options := _options(group)) for p in group["params"]
        }
        for each in optimizers_in(optimizer)
    }


def _put_options(optimizer: Any, saved: _Options) -> None:
    for each in optimizers_in(optimizer):
        options_of = saved.get(id(each), {})
        for group in each.param_groups:
            params = group["params"]
            options = next((options_of[p] for p in params if p in options_of), None)
            if options is None:
                continue
            group.clear()
            group["params"] = params
            group.update(_options(options))


def _options(group: Mapping[str, Any]) -> dict[str, Any]:
    return {
        key: value.clone() if isinstance(value, Tensor) else copy.deepcopy(value)
        for key, value in group.items()
        if key != "params"
    }


def _is_stateful(other: Any) -> bool:
    return callable(getattr(other, "state_dict", None)) and callable(getattr(other, "load_state_dict", None))


def _is_tensors(other: Stateful) -> bool:
    """Return True if all state of a module is in tensors that a `Snapshot` copies."""
    if not isinstance(other, nn.Module):
        return False
    named = dict(other.named_parameters(remove_duplicate=False))
    held = named | dict(other.named_buffers(remove_duplicate=False))
    return other.state_dict().keys() <= held.keys() and all(map(_is_plain, held.values()))


def _is_plain(tensor: Tensor) -> bool:
    """Return True if the tensor, or its shard, is one piece of memory."""
    around_others = hasattr(tensor, "__tensor_flatten__") and not hasattr(tensor, "to_local")
    return not is_lazy(tensor) and tensor.layout is torch.strided and not around_others
