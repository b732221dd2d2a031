"""Optimizer state: optimizers inside optimizers, and state that `state_dict()` does not save.

A container such as `self.optimizers = [Muon(...), AdamW(...)]`, a wrapper such as accelerate's
`AcceleratedOptimizer`, or Lookahead around another optimizer has an empty or partial `state` of its own.
"""

from __future__ import annotations

import sys
import warnings
import weakref
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from functools import cache
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType, NoneType, SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from stackwise.support.arguments import require
from stackwise.support.tensor_tree import shown_path

__all__ = [
    "check_kept",
    "is_optimizer",
    "optimizers_in",
    "own_state_of",
    "parameters_of",
    "states_of",
    "unsaved",
    "warn_once",
]

# Attributes of every torch optimizer that hold tensors and options, never an optimizer.
_OWN = frozenset({"state", "param_groups", "defaults"})
_SEQUENCES = (list, tuple, set, frozenset, deque)
_SKIPPED = (
    *(weakref.ProxyType, weakref.CallableProxyType, str, bytes, int, float, complex, NoneType),
    *(type, ModuleType, FunctionType, BuiltinFunctionType, nn.Module),
)
# Packages whose objects, such as loggers and loaders, hold no optimizer state.
_LIBRARIES = sys.stdlib_module_names | {"numpy", "torch"}
# Memory and version of the tensors in the attributes of each optimizer, at the last `check_kept`.
_LAST_LOOK: weakref.WeakKeyDictionary[Any, dict[tuple[Any, ...], tuple[int, int]]] = (
    weakref.WeakKeyDictionary()
)
_OBJECTS = 2  # largest nesting of objects that are no optimizers


def is_optimizer(given: Any) -> bool:
    """Return True for a `torch.optim.Optimizer` and any object with `param_groups` and `step()`."""
    if isinstance(given, torch.optim.Optimizer):
        return True
    if isinstance(given, Tensor | nn.Module | type):
        return False
    return hasattr(given, "param_groups") and callable(getattr(given, "step", None))


def optimizers_in(given: Any) -> list[Any]:
    """Return all optimizers in `given`, inner ones before outer ones. If `given` is an optimizer, it is last.

    Attributes, lists, tuples, sets, values of mappings, namespaces, objects of other classes and the objects
    of bound methods are searched. If an object refers to its optimizer, as a trainer does, only optimizers
    that share parameters with it are included. Modules, hooks and objects of libraries are not searched.
    """
    return [place.value for place in _places(given, (*_SKIPPED, Tensor))][::-1]


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

    An entry that appears in a container and in its inner optimizer is yielded once, for the inner one.
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


def own_state_of(optimizer: Any) -> Any:
    """Return `state_dict()` if the class overrides it, otherwise None.

    Also None if it raises RuntimeError, as in `ZeroRedundancyOptimizer` before `consolidate_state_dict`.
    """
    try:
        return optimizer.state_dict() if _has_own_state(optimizer) else None
    except RuntimeError:
        return None


def check_kept(
    key: str, optimizer: Any, saved: Iterable[Tensor], loses: str, *, is_fresh: bool = False
) -> None:
    """Raise if tensors in attributes of an optimizer would be lost.

    They are lost if neither `state` nor `state_dict()` contains them. A tensor counts as state if it has the
    shape and device of a trained parameter. Parameters, gradients and tensors in `param_groups` or `state` do
    not count. Other tensors, and those in objects of other classes, cause a warning once. A tensor that was
    neither written in place nor replaced since the last call is a constant, and ignored.

    Args:
        key: name of the optimizer in the error.
        optimizer: searched as in `optimizers_in`.
        saved: tensors of its own `state_dict()`.
        loses: action that would lose the state, such as "a rewind".
        is_fresh: True before the first update: only record the tensors, because constants may have been
            filled in place.

    Raises:
        ValueError: names the attribute.
    """
    places = _changed(optimizer, [p for p in _places(optimizer, _SKIPPED) if _may_be_state(p.value)])
    if is_fresh or not places:
        return
    parameters = parameters_of(optimizer)
    held = [[each.param_groups, getattr(each, "state", None)] for each in optimizers_in(optimizer)]
    known = [*parameters, *(p.grad for p in parameters if p.grad is not None)]
    known += [place.value for place in _places(held, _SKIPPED) if isinstance(place.value, Tensor)]
    memories = set(map(_memory, known))
    places = [place for place in places if _memory(place.value) not in memories]
    lost, is_certain = unsaved([place.value for place in places], saved, known)
    lost_ids = set(map(id, lost))
    allowed = "state in `state`, or in state_dict() and load_state_dict() of its class"
    for place in places:
        if id(place.value) in lost_ids:
            name = f"{key}.{shown_path(place.path)}"
            is_state = is_certain and _is_state(place, parameters)
            require(not is_state, name, f"a tensor that {loses} loses", allowed)
            warn_once(f"{name}: got a tensor that {loses} loses; if it is state, allowed: {allowed}")


def _is_state(place: _Place, parameters: list[nn.Parameter]) -> bool:
    """Return True for a tensor like a parameter, directly in optimizers whose `state_dict()` can be read."""
    kind = place.value.shape, place.value.device
    if place.objects or all((p.shape, p.device) != kind for p in parameters):
        return False
    return not any(_has_own_state(o) and own_state_of(o) is None for o in place.owners)


def _changed(optimizer: Any, places: list[_Place]) -> list[_Place]:
    """Return the tensors that were written or replaced since the last call with this optimizer.

    A tensor that the last call did not see is returned if it was modified in place.
    """
    now = {place.path: (_memory(place.value), _version(place.value)) for place in places}
    before: dict[tuple[Any, ...], tuple[int, int]] = {}
    with suppress(TypeError):  # an optimizer without weak references or a hash
        before = _LAST_LOOK.get(optimizer, before)
        _LAST_LOOK[optimizer] = now
    return [p for p in places if now[p.path] != before.get(p.path, (_memory(p.value), 0))]


def unsaved(tensors: list[Tensor], saved: Iterable[Tensor], known: list[Tensor]) -> tuple[list[Tensor], bool]:
    """Return the tensors that are missing in `saved`, and True if the answer is certain.

    If `saved` contains copies, the answer is a guess by shape.

    Args:
        tensors: state of an optimizer.
        saved: tensors of a state dict.
        known: tensors of the optimizer whose memory is not a copy of `tensors`.
    """
    memories = {_memory(each): each for each in saved}
    ours = set(map(_memory, [*tensors, *known]))
    copies = Counter(each.shape for memory, each in memories.items() if memory not in ours)
    is_certain = not copies
    missing = [each for each in tensors if _memory(each) not in memories]
    copies.subtract(each.shape for each in missing)
    return [each for each in missing if copies[each.shape] < 0], is_certain


@cache
def warn_once(message: str) -> None:
    """Issue a warning once per process."""
    warnings.warn(message, RuntimeWarning, stacklevel=2)


class _Place(NamedTuple):
    """An optimizer or a tensor, and the way to it.

    Attributes:
        value: the optimizer or tensor.
        path: attributes, keys and indices.
        owners: optimizers on the way, the outermost one first.
        objects: number of objects that are no optimizers between the last optimizer and this one.
        is_foreign: True if such an object refers to an owner.
    """

    value: Any
    path: tuple[Any, ...] = ()
    owners: tuple[Any, ...] = ()
    objects: int = 0
    is_foreign: bool = False


def _places(given: Any, skipped: tuple[Any, ...]) -> Iterator[_Place]:
    """Yield the optimizers and tensors in `given`, each once, the outermost ones first."""
    seen: set[int] = set()
    places = deque([_Place(given)])
    while places:
        place = places.popleft()
        value = place.value
        if id(value) in seen or (isinstance(value, Tensor) and place.is_foreign):
            continue
        if isinstance(value, Tensor):
            yield place
        elif is_optimizer(value):
            if place.is_foreign and not _share_parameters(value, place.owners[0]):
                continue
            place = place._replace(owners=(*place.owners, value), objects=0, is_foreign=False)
            yield place
        seen.add(id(value))
        places += [part for part in _parts(place) if not isinstance(part.value, skipped)]


def _parts(place: _Place) -> Iterator[_Place]:
    """Yield the values directly in a value."""
    value, objects, is_foreign = place.value, place.objects, place.is_foreign
    items: Iterable[tuple[Any, Any]] = ()
    if isinstance(value, Tensor):
        pass
    elif is_optimizer(value):
        items = _attributes(value)
    elif isinstance(value, Mapping):
        # Keys that are parameters have no short name.
        pairs = enumerate(value.items())
        items = [(key if isinstance(key, str | int) else n, each) for n, (key, each) in pairs]
    elif isinstance(value, _SEQUENCES):
        items = enumerate(value)
    elif isinstance(value, MethodType):
        items = [("__self__", value.__self__)]
    elif isinstance(value, SimpleNamespace) or (objects < _OBJECTS and not _is_of_library(value)):
        items, objects = _attributes(value), objects + (not isinstance(value, SimpleNamespace))
        is_foreign = is_foreign or _refers_to(items, place.owners)
    for name, each in items:
        yield _Place(each, (*place.path, name), place.owners, objects, is_foreign)


def _attributes(value: Any) -> list[tuple[str, Any]]:
    attributes = getattr(value, "__dict__", {}).items()
    return [(name, each) for name, each in attributes if name not in _OWN and not name.endswith("_hooks")]


def _is_of_library(value: Any) -> bool:
    return type(value).__module__.partition(".")[0] in _LIBRARIES


def _refers_to(attributes: Iterable[tuple[str, Any]], owners: tuple[Any, ...]) -> bool:
    """Return True if an owner is among the attributes, or in a container among them."""
    values = [value for _, value in attributes]
    for value in list(values):
        if isinstance(value, Mapping):
            values += value.values()
        elif isinstance(value, _SEQUENCES):
            values += value
    return not set(map(id, owners)).isdisjoint(map(id, values))


def _share_parameters(a: Any, b: Any) -> bool:
    ids = ({id(p) for group in each.param_groups for p in group["params"]} for each in (a, b))
    return not set.isdisjoint(*ids)


def _may_be_state(value: Any) -> bool:
    return isinstance(value, Tensor) and not isinstance(value, nn.Parameter) and value.numel() > 1


def _version(tensor: Tensor) -> int:
    """Return how often a tensor was written in place."""
    return 0 if tensor.is_inference() else tensor._version


def _memory(tensor: Tensor) -> int:
    """Return where the memory of a tensor begins, or its id if it has none of its own."""
    try:
        return tensor.untyped_storage().data_ptr() or id(tensor)
    except (RuntimeError, ValueError):  # sparse, or a subclass
        return id(tensor)


def _has_own_state(optimizer: Any) -> bool:
    is_usual = getattr(type(optimizer), "state_dict", None) is torch.optim.Optimizer.state_dict
    return not is_usual and all(callable(getattr(optimizer, f"{do}state_dict", None)) for do in ("", "load_"))
