"""ObjectState: state of an object, which can also be loaded in another arrangement of processes.

The state of an optimizer refers to parameters by number. Here it refers to them by name if a module among the
objects has them, so that neither their order nor the number of processes matters. Names are those of a model
that is not compiled.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, MutableMapping, Sequence
from itertools import chain, zip_longest
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from stackwise.checkpoint.tree import is_sharded
from stackwise.support.arguments import require
from stackwise.support.optimizer_state import check_kept, is_optimizer, states_of, unsaved, warn_once
from stackwise.support.tensor_tree import Path, leaves

__all__ = ["Objects", "as_many_groups", "equal_bits", "plain_name", "unwrapped"]

_COMPILED = "_orig_mod"  # name under which the compiler stores the original module
_KINDS = "what has state_dict() and load_state_dict(), or a mapping that can be changed"


class Objects:
    """Objects of a checkpoint, by name.

    Args:
        objects: objects by the name under which each is stored.

    Raises:
        ValueError: a name or an object that cannot be stored.
    """

    def __init__(self, objects: Mapping[str, Any]) -> None:
        require(
            isinstance(objects, Mapping), "objects", type(objects).__name__, "a mapping of names to objects"
        )
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
                    self._parameters[f"{name}.{plain_name(key)}"] = parameter
                    self._names.setdefault(id(parameter), f"{name}.{plain_name(key)}")

    def __iter__(self) -> Any:
        return iter(self._objects)

    def is_shared(self, name: str) -> bool:
        """Return True if all processes share one state, as for modules and optimizers."""
        return isinstance(self._objects[name], nn.Module | torch.optim.Optimizer)

    def state(self, name: str) -> Any:
        """Return the current state of an object. Its tensors are the object's own.

        Raises:
            ValueError: an optimizer whose `state_dict()` lacks state of the optimizers inside it, or state in
                its attributes.
        """
        each = self._objects[name]
        if not hasattr(each, "state_dict"):
            return dict(each)
        state = each.state_dict()
        if is_optimizer(each):
            _check_complete(name, each, state)
        if isinstance(each, torch.optim.Optimizer):
            return self._by_name(each, state)
        return _with_plain_names(state) if isinstance(each, nn.Module) else state

    def load(self, states: Mapping[str, Any]) -> None:
        """Load the state of each object.

        Raises:
            Exception: an object refuses a state that does not fit.
        """
        for name, each in self._objects.items():
            if isinstance(each, torch.optim.Optimizer):
                self._load_optimizer(name, each, states)
            elif isinstance(each, nn.Module):
                each.load_state_dict(_with_names_of(each, states[name]))
            elif hasattr(each, "load_state_dict"):
                each.load_state_dict(states[name])
            else:
                each.clear()
                each.update(states[name])

    def has_common(self, name: str) -> bool:
        """Return True if an object reports the part of its state that is equal in all processes."""
        return hasattr(self._objects[name], "common_state")

    def common(self, name: str, state: Any) -> Any:
        """Return the part of a state that is equal in all processes.

        If the object does not report this part, return the full state.
        """
        return self._objects[name].common_state(state) if self.has_common(name) else state

    def sharded(self, name: str) -> dict[Path, Tensor]:
        """Return the DTensors that define the sharding of a state's tensors, by their path in the state."""
        each = self._objects[name]
        if isinstance(each, torch.optim.Optimizer):
            # Before the first step the optimizer has no state. It is sharded like the parameters.
            return {
                ("state", key): parameter
                for key, parameter in self._parameters.items()
                if is_sharded(parameter)
            }
        if not hasattr(each, "state_dict"):
            return {}
        return {path: leaf for path, leaf in leaves(self.state(name)).items() if is_sharded(leaf)}

    def _load_optimizer(self, name: str, optimizer: torch.optim.Optimizer, states: Mapping[str, Any]) -> None:
        """Load the state of an optimizer in the dtypes that were read.

        `Optimizer.load_state_dict` converts all values except `step` to the dtype of the parameter. This is
        right for a value that had this dtype when it was saved. A wider value would be rounded. If the saved
        dtype of the parameter is unknown, as for an optimizer without its module, only single numbers are
        restored in their saved dtype: tensors are used together with the gradient, in the dtype of the
        parameter.
        """
        state = self._by_number(name, optimizer, states[name])
        optimizer.load_state_dict(state)
        own_layout = not isinstance(state, dict) or "param_groups" not in state
        if own_layout or not isinstance(state.get("state"), dict):
            return
        live = [p for group in optimizer.param_groups for p in group["params"]]
        numbers = [number for group in state["param_groups"] for number in group["params"]]
        if len(live) != len(numbers):  # the optimizer has converted its state to another structure
            return
        saved = self._saved_dtypes(states)
        for parameter, number in zip(live, numbers, strict=True):
            then = saved.get(self._names.get(id(parameter), ""))
            _unrounded(optimizer.state.get(parameter), state["state"].get(number), parameter, then)

    def _saved_dtypes(self, states: Mapping[str, Any]) -> dict[str, torch.dtype]:
        """Return the dtypes of the saved parameters, by name."""
        modules = {name: states[name] for name, each in self._objects.items() if isinstance(each, nn.Module)}
        return {
            f"{name}.{key}": value.dtype
            for name, state in modules.items()
            if isinstance(state, Mapping)
            for key, value in _with_plain_names(state).items()
            if isinstance(value, Tensor)
        }

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
        if not isinstance(state, dict) or "param_groups" not in state:
            return state
        groups = as_many_groups(state["param_groups"], optimizer.param_groups)
        state = {**state, "param_groups": groups}
        saved = [set(group["params"]) for group in groups]
        if not any(isinstance(key, str) for key in chain(*saved)):
            return state
        ours = optimizer.state_dict()
        names = self._numbered(optimizer, ours)
        allowed = "the optimizer together with the module whose parameters it has"
        require(names is not None, f"objects[{name!r}]", "an optimizer alone", allowed)
        assert names is not None
        here = [{names[number] for number in group["params"]} for group in ours["param_groups"]]
        for i, (theirs, mine) in enumerate(zip_longest(saved, here, fillvalue=set[Any]())):
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
        """Return the name of each number in the optimizer's state; None if a number has no name."""
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


def as_many_groups(
    saved: Sequence[dict[str, Any]], ours: Sequence[dict[str, Any]]
) -> Sequence[dict[str, Any]]:
    """Return the saved parameter groups for an optimizer that has more or fewer groups without parameters.

    Such groups only have settings, and the optimizer's own settings are used for them.

    Args:
        saved: groups of the saved state.
        ours: current groups of the optimizer.

    Returns:
        as many groups as `ours`; `saved` itself if the numbers of groups with parameters differ.
    """
    filled = [group for group in saved if len(group["params"])]
    alike = [len(group["params"]) > 0 for group in saved] == [len(group["params"]) > 0 for group in ours]
    if alike or len(filled) != sum(len(group["params"]) > 0 for group in ours):
        return saved
    rest = iter(filled)
    return [next(rest) if group["params"] else {**group, "params": []} for group in ours]


def _check_complete(name: str, optimizer: Any, state: Any) -> None:
    """Refuse a state dict that lacks state of the optimizers inside `optimizer`, or tensors in attributes."""
    saved = list(leaves(state, (name,)).values())
    states = [
        (owner, tensor)
        for owner, _, value in states_of(optimizer)
        for tensor in leaves(value, (name, "state")).values()
    ]
    own = [tensor for owner, tensor in states if owner is optimizer]
    # A step counter may be saved as a number.
    inner = {id(t): type(owner).__name__ for owner, t in states if owner is not optimizer and t.ndim}
    lost, is_certain = unsaved([tensor for _, tensor in states if id(tensor) in inner], saved, own)
    kinds = ", ".join(dict.fromkeys(inner[id(tensor)] for tensor in lost))
    key, got = f"objects[{name!r}].state_dict()", f"nothing of the state of optimizers in it ({kinds})"
    allowed = "a complete one; or save each of them as an object of its own"
    require(not (lost and is_certain), key, got, allowed)
    if lost:
        warn_once(f"{key}: got other tensors than those of {kinds} in it; allowed: {allowed}")
    check_kept(f"objects[{name!r}]", optimizer, saved, "a checkpoint")


def unwrapped(each: Any) -> Any:
    """Return the module inside of wrappers by DDP and the compiler, which only change its names."""
    while isinstance(each, DistributedDataParallel) or (
        isinstance(each, nn.Module) and hasattr(each, "_orig_mod")
    ):
        each = each.module if isinstance(each, DistributedDataParallel) else each._orig_mod
    return each


def plain_name(name: str) -> str:
    """Return the name in a model that is not compiled."""
    return ".".join(part for part in name.split(".") if part != _COMPILED)


def _with_plain_names(state: Any) -> Any:
    """Return the state of a module with plain names, no matter which of its parts are compiled."""
    if not isinstance(state, Mapping) or not any(_COMPILED in str(key) for key in state):
        return state
    plain = OrderedDict((plain_name(key), value) for key, value in state.items())
    versions = getattr(state, "_metadata", {})
    plain._metadata = {plain_name(key): value for key, value in versions.items()}  # type: ignore[attr-defined]
    return plain


def _with_names_of(module: nn.Module, state: Any) -> Any:
    """Return a state with the names of `module`, parts of which may be compiled."""
    state = _with_plain_names(state)
    if not any(_COMPILED in name for name, _ in module.named_modules()):
        return state
    ours = module.state_dict()
    names = {plain_name(key): key for key in ours}
    modules = {plain_name(name): name for name, _ in module.named_modules(remove_duplicate=False)}
    # An entry that is created only during the load has no name yet, but its module has one.
    named = OrderedDict((names.get(key) or _within(modules, key), value) for key, value in state.items())
    versions, of_ours = (getattr(each, "_metadata", {}) for each in (state, ours))
    found = {key: versions[plain_name(key)] for key in of_ours if plain_name(key) in versions}
    named._metadata = found  # type: ignore[attr-defined]
    return named


def _within(modules: Mapping[str, str], key: str) -> str:
    """Return a key of a plain state with the name of the innermost of `modules` that contains it."""
    parts = key.split(".")
    for count in range(len(parts) - 1, 0, -1):
        name = modules.get(".".join(parts[:count]))
        if name is not None:
            return ".".join([name, *parts[count:]])
    return key


def _unrounded(held: Any, read: Any, parameter: Tensor, saved: torch.dtype | None) -> Any:
    """Return the state of a parameter as it was read, if `Optimizer.load_state_dict` only changed its dtype.

    Args:
        held: state in the optimizer. A value that the optimizer has changed itself remains. Dictionaries are
            changed in place.
        read: state that was read.
        parameter: current parameter.
        saved: dtype of the parameter when its state was saved; None: unknown.
    """
    if isinstance(held, Tensor) and isinstance(read, Tensor):
        return _unrounded_tensor(held, read, parameter, saved)
    if isinstance(held, dict) and isinstance(read, dict):
        for key in (held.keys() & read.keys()) - {"step"}:
            held[key] = _unrounded(held[key], read[key], parameter, saved)
    if type(held) in (list, tuple) and isinstance(read, list | tuple) and len(held) == len(read):
        return type(held)(_unrounded(*pair, parameter, saved) for pair in zip(held, read, strict=True))
    return held


def _unrounded_tensor(held: Tensor, read: Tensor, parameter: Tensor, saved: torch.dtype | None) -> Tensor:
    if held.dtype != parameter.dtype or read.dtype in (parameter.dtype, saved):
        return held
    if saved is None and (held.dim() or not parameter.dim()):
        return held
    own = read.to(held.device)
    return own if equal_bits(_local(held), _local(own).to(held.dtype)) else held


def equal_bits(a: Tensor, b: Tensor) -> bool:
    """Return True if two tensors are equal bit for bit, including NaN."""
    bits = [each.reshape(-1).view(torch.uint8) for each in (a, b)]
    return (a.dtype, a.shape) == (b.dtype, b.shape) and torch.equal(*bits)


def _local(tensor: Tensor) -> Tensor:
    """Return the part of a tensor in this process."""
    local: Tensor = tensor.to_local() if is_sharded(tensor) else tensor  # type: ignore[attr-defined]
    return local
