"""ObjectState: what an object has to keep, and how it gets it back, in another arrangement of processes too.

The state of an optimizer refers to parameters by number. Here it refers to them by name wherever a module
among the objects has them, so that neither their order nor the number of processes matters.
"""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from stackwise.argument import require
from stackwise.checkpoint.tree import Path, is_sharded, leaves

__all__ = ["Objects", "unwrapped"]

_KINDS = "what has state_dict() and load_state_dict(), or a mapping that can be changed"


class Objects:
    """The objects of a checkpoint, by name.

    Args:
        objects: by the name that each is kept under.

    Raises:
        ValueError: a name or an object that cannot be kept.
    """

    def __init__(self, objects: Mapping[str, Any]) -> None:
        self._objects = {name: unwrapped(each) for name, each in objects.items()}
        for name, each in self._objects.items():
            require(
                isinstance(name, str) and name.isidentifier(), "objects", name, "names like those in Python"
            )
            stateful = hasattr(each, "state_dict") and hasattr(each, "load_state_dict")
            sound = stateful or isinstance(each, MutableMapping)
            require(sound, f"objects[{name!r}]", type(each).__name__, _KINDS)
        self._parameters: dict[str, Tensor] = {}
        self._names: dict[int, str] = {}
        for name, each in self._objects.items():
            if isinstance(each, nn.Module):
                for key, parameter in each.named_parameters():
                    self._parameters[f"{name}.{key}"] = parameter
                    self._names.setdefault(id(parameter), f"{name}.{key}")

    def __iter__(self) -> Any:
        return iter(self._objects)

    def is_shared(self, name: str) -> bool:
        """Whether all processes have one state together, as of modules and optimizers."""
        return isinstance(self._objects[name], nn.Module | torch.optim.Optimizer)

    def state(self, name: str) -> Any:
        """The state of an object now; its tensors are the object's own."""
        each = self._objects[name]
        if not hasattr(each, "state_dict"):
            return dict(each)
        state = each.state_dict()
        if isinstance(each, torch.optim.Optimizer):
            return self._by_name(each, state)
        return state

    def load(self, name: str, state: Any) -> None:
        """Give an object a state.

        Raises:
            Exception: as the object refuses one that does not fit.
        """
        each = self._objects[name]
        if isinstance(each, torch.optim.Optimizer):
            state = self._by_number(name, each, state)
        if hasattr(each, "load_state_dict"):
            each.load_state_dict(state)
        else:
            each.clear()
            each.update(state)

    def sharded(self, name: str) -> dict[Path, Tensor]:
        """The DTensors that the tensors of a state have to be like, by their path in it."""
        each = self._objects[name]
        if isinstance(each, torch.optim.Optimizer):
            # Before the first step there is no state to look at; it is arranged as the parameters are.
            return {
                ("state", key): parameter
                for key, parameter in self._parameters.items()
                if is_sharded(parameter)
            }
        if not hasattr(each, "state_dict"):
            return {}
        return {path: leaf for path, leaf in leaves(each.state_dict()).items() if is_sharded(leaf)}

    def updated_by_optimizers(self) -> set[int]:
        """Where the memory of parameters and of optimizers' states begins.

        DTensors are left out: torch does not count the changes of their parts.
        """
        states = [each.state for each in self._objects.values() if isinstance(each, torch.optim.Optimizer)]
        tensors = [*self._parameters.values(), *(leaf for state in states for leaf in leaves(state).values())]
        return {each.data_ptr() for each in tensors if not is_sharded(each)}

    def _by_name(self, optimizer: torch.optim.Optimizer, state: Any) -> Any:
        names = self._numbered(optimizer, state)
        if names is None:
            return state
        groups = [
            {**group, "params": [names[number] for number in group["params"]]}
            for group in state["param_groups"]
        ]
        kept = {names[number]: value for number, value in state["state"].items()}
        return {**state, "state": kept, "param_groups": groups}

    def _by_number(self, name: str, optimizer: torch.optim.Optimizer, state: Any) -> Any:
        """Undo `_by_name` for an optimizer that may have its parameters in another order."""
        groups = state["param_groups"] if isinstance(state, dict) and "param_groups" in state else []
        saved = [list(group["params"]) for group in groups]
        if not any(isinstance(key, str) for keys in saved for key in keys):
            return state
        ours = optimizer.state_dict()
        names = self._numbered(optimizer, ours)
        allowed = "the optimizer together with the module whose parameters it has"
        require(names is not None, f"objects[{name!r}]", "an optimizer alone", allowed)
        assert names is not None
        here = [[names[number] for number in group["params"]] for group in ours["param_groups"]]
        for i in range(max(len(saved), len(here))):
            theirs, mine = (
                set(saved[i : i + 1][0] if i < len(saved) else []),
                set(here[i] if i < len(here) else []),
            )
            differing = sorted(theirs ^ mine)[:3]
            require(
                theirs == mine,
                f"objects[{name!r}].param_groups[{i}]",
                f"other parameters than those saved ({', '.join(differing)})",
                "the parameter groups that were saved",
            )
        numbers = {name: number for number, name in names.items()}
        loaded = [
            {**group, "params": mine["params"]}
            for group, mine in zip(groups, ours["param_groups"], strict=True)
        ]
        unknown = [key for key in state["state"] if key not in numbers]
        require(not unknown, f"objects[{name!r}].state", unknown[:3], "the parameters of its groups")
        kept = {numbers[key]: value for key, value in state["state"].items()}
        return {**state, "state": kept, "param_groups": loaded}

    def _numbered(self, optimizer: torch.optim.Optimizer, state: Any) -> dict[Any, str] | None:
        """The name of each number in the optimizer's state; None: some have none."""
        if not isinstance(state, dict) or not state.keys() >= {"state", "param_groups"}:
            return None
        names: dict[Any, str] = {}
        for live, packed in zip(optimizer.param_groups, state["param_groups"], strict=True):
            for parameter, number in zip(live["params"], packed["params"], strict=True):
                name = self._names.get(id(parameter))
                if name is None:
                    return None
                names[number] = name
        return names if names.keys() >= state["state"].keys() else None


def unwrapped(each: Any) -> Any:
    """The module in what DDP and the compiler put around it, which only change its names."""
    while isinstance(each, DistributedDataParallel) or (
        isinstance(each, nn.Module) and hasattr(each, "_orig_mod")
    ):
        each = each.module if isinstance(each, DistributedDataParallel) else each._orig_mod
    return each
