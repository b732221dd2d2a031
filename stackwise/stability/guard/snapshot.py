"""Snapshot: model, optimizer and what goes with them, in memory, to be put back bit for bit.

Parameters, buffers and the optimizer's tensors stay the objects that they are, so that compiled code and
other references to them stay right.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from stackwise.argument import require
from stackwise.stability.buffers import elements

__all__ = ["Moment", "Snapshot", "Stateful"]

# What it is, and which: a name, or a parameter of the optimizer and a key of its state.
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
        others: of further objects by name.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        scheduler: Stateful | None,
        others: Mapping[str, Stateful] | None = None,
    ) -> None:
        # By the parameters of each: groups come and go, and others may join one in front.
        self._options = {
            p: options
            for group in optimizer.param_groups
            if (options := _options(group))
            for p in group["params"]
        }
        self._scheduler = None if scheduler is None else copy.deepcopy(dict(scheduler.state_dict()))
        self._others = {name: copy.deepcopy(dict(o.state_dict())) for name, o in (others or {}).items()}

    def restore(
        self,
        optimizer: torch.optim.Optimizer,
        scheduler: Stateful | None,
        others: Mapping[str, Stateful] | None = None,
    ) -> None:
        """Put everything back. Groups that the optimizer did not have yet stay as they are."""
        if scheduler is not None and self._scheduler is not None:
            scheduler.load_state_dict(copy.deepcopy(self._scheduler))
        # Behind the scheduler: what loading it does to the rates is undone.
        for group in optimizer.param_groups:
            kept = group["params"]
            options = next((self._options[p] for p in kept if p in self._options), None)
            if options is None:
                continue
            group.clear()
            group["params"] = kept
            for key, value in options.items():
                group[key] = value.clone() if isinstance(value, Tensor) else copy.deepcopy(value)
        for name, other in (others or {}).items():
            if name in self._others:
                other.load_state_dict(copy.deepcopy(self._others[name]))


class Snapshot:
    """A copy of all tensors that a training run changes; taken again, it is written over.

    It holds as many bytes as they do, and no more while it is taken. On CUDA nothing waits for the copies
    that `take` begins. Of sharded tensors (DTensor) the shard of this process is kept.

    Args:
        model: parameters and buffers.
        optimizer: its state of every parameter.
        on_host: keep the copies in host memory, pinned where the model is on CUDA.
    """

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer, *, on_host: bool = True) -> None:
        self._model, self._optimizer, self._on_host = model, optimizer, on_host
        self._kept: dict[_Key, Any] = {}

    @property
    def nbytes(self) -> int:
        """Bytes that are held."""
        tensors = [value for value in self._kept.values() if isinstance(value, Tensor)]
        return sum(tensor.numel() * tensor.element_size() for tensor in tensors)

    @torch.no_grad()
    def take(self) -> None:
        """Copy everything as it is now."""
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
        for (what, which), tensor, kept in known:
            fits = what == "buffer" or tensor.shape == kept.shape
            called = f"{what} {which}" if isinstance(which, str) else f"{what} of the optimizer"
            require(fits, called, tuple(tensor.shape), f"{tuple(kept.shape)}, as it was")
        for _, tensor, kept in known:
            if tensor.shape == kept.shape:
                tensor.copy_(kept, non_blocking=True)
        states: dict[nn.Parameter, dict[Any, Any]] = {}
        for (what, which, *rest), value in self._kept.items():
            if what == "optimizer":
                states.setdefault(which, {})[rest[0]] = value
        state = self._optimizer.state
        for p in self._parameters():
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
        for p in self._parameters():
            if p in self._optimizer.state:
                for key, value in self._optimizer.state[p].items():
                    yield ("optimizer", p, key), value

    def _tensors(self) -> Iterator[tuple[_Key, Tensor]]:
        seen = set()
        for name, p in self._model.named_parameters():
            seen.add(id(p))
            yield ("parameter", name), elements(p)
        for name, buffer in self._model.named_buffers():
            yield ("buffer", name), elements(buffer)
        for p in self._parameters():
            if id(p) not in seen:
                yield ("parameter", p), elements(p)

    def _parameters(self) -> list[nn.Parameter]:
        return [p for group in self._optimizer.param_groups for p in group["params"]]

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


def _options(group: Mapping[str, Any]) -> dict[str, Any]:
    return {
        key: value.clone() if isinstance(value, Tensor) else copy.deepcopy(value)
        for key, value in group.items()
        if key != "params"
    }
