"""Live memory: bytes and objects of the process at one moment."""

from __future__ import annotations

import ctypes
import gc
import sys
import weakref
from collections import Counter, OrderedDict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

__all__ = ["Bytes", "Census", "Earlier", "bytes_now", "census"]

_PROBE = 1 << 22  # bytes, much more than the free memory of an allocator
_SIZED: tuple[type, ...] = (list, dict, set, frozenset, tuple, bytearray)


class _Mallinfo2(ctypes.Structure):
    """Result of mallinfo2(3)."""

    _fields_ = [
        (name, ctypes.c_size_t)
        for name in (
            *("arena", "ordblks", "smblks", "hblks", "hblkhd"),
            *("usmblks", "fsmblks", "uordblks", "fordblks", "keepcost"),
        )
    ]


@dataclass(frozen=True)
class Bytes:
    """Bytes in use at one moment. None: not reported.

    Attributes:
        host: bytes allocated by the C library: tensors on the CPU, autograd's graph, large Python objects.
        host_kept: bytes that the C library has from the system, allocated or free.
        device: bytes of tensors on the CUDA device.
        device_kept: bytes that torch's allocator has from the device.
    """

    host: int | None
    host_kept: int | None
    device: int | None
    device_kept: int | None


@dataclass(frozen=True)
class Census:
    """Numbers of live objects at one moment.

    Attributes:
        tensors: number of tensors, including frozen ones. A full ring buffer frees one for each new one.
        nodes: number of autograd nodes that are reachable from a tensor.
        objects: number of all objects.
        callables: number of objects whose type can be called: functions, closures, modules.
        hooks: number of callbacks in the registries that existed before.
        counts: if requested, number of objects of each type, by its name; nodes as "autograd NAME".
        sizes: if requested, bytes of the objects of each type. For tensors, each storage counts once. For
            other objects, the objects that they refer to are not included.
    """

    tensors: int
    nodes: int
    objects: int
    callables: int
    hooks: int
    counts: Counter[str]
    sizes: Counter[str]


def bytes_now(device: torch.device) -> Bytes:
    """Return the current bytes. On CUDA, wait for the device first."""
    on_device, kept_on_device = None, None
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        on_device, kept_on_device = torch.cuda.memory_allocated(device), torch.cuda.memory_reserved(device)
    host, kept = None, None
    if _glibc_allocates():
        info = _mallinfo2()
        host, kept = info.uordblks + info.hblkhd, info.arena + info.hblkhd
    return Bytes(host, kept, on_device, kept_on_device)


def _mallinfo2() -> Any:
    return _library().mallinfo2()


@cache
def _library() -> ctypes.CDLL:
    library = ctypes.CDLL(None)
    library.mallinfo2.restype = _Mallinfo2
    return library


@cache
def _glibc_allocates() -> bool:
    """Return True if this process uses the allocator of glibc 2.33 or later."""
    try:
        _library()
    except (AttributeError, OSError, TypeError):
        return False
    before = _mallinfo2()
    probe = bytes(_PROBE)
    after = _mallinfo2()
    return bool(after.uordblks + after.hblkhd - before.uordblks - before.hblkhd >= len(probe))


@dataclass(frozen=True)
class Earlier:
    """Objects that existed before and can grow in place. They are frozen.

    Attributes:
        tensors: tensors whose graph may grow, because `total += loss` changes a tensor in place.
        registries: dicts with the hooks of modules, tensors and optimizers, in which the same function may be
            registered repeatedly.
    """

    tensors: tuple[weakref.ref[Tensor], ...] = ()
    registries: tuple[OrderedDict[Any, Any], ...] = ()

    @classmethod
    def now(cls) -> Earlier:
        """Return the objects that are currently reachable or wait for the garbage collector."""
        objects = gc.get_objects()
        of_tensors = _tensor_kinds(_kinds(objects))
        tensors = tuple(weakref.ref(each) for each in objects if id(type(each)) in of_tensors)
        return cls(tensors, tuple(each for each in objects if type(each) is OrderedDict))


NOTHING_EARLIER = Earlier()


def census(earlier: Earlier = NOTHING_EARLIER, *, names: bool = False, sizes: bool = False) -> Census:
    """Return the numbers of objects that the garbage collector tracks and that are not frozen.

    Python's views of storages and of autograd's nodes are not counted, because this inspection creates them,
    and they live as long as the viewed object.

    Args:
        earlier: frozen objects that are included.
        names: True to count by type.
        sizes: True to add up bytes by type.
    """
    objects = gc.get_objects()
    kinds = _kinds(objects)
    of_tensors = _tensor_kinds(kinds)
    views = {key for key, kind in kinds.items() if _is_view(kind)}
    new = [each for each in objects if id(type(each)) in of_tensors]
    frozen = [each for each in (reference() for reference in earlier.tensors) if each is not None]
    numbers = Counter(map(id, map(type, objects)))
    for key in views:
        del numbers[key]
    callables = sum(number for key, number in numbers.items() if _is_called(kinds[key]))
    hooks = sum(callable(value) for registry in earlier.registries for value in registry.values())
    counts: Counter[str] = Counter()
    found: Counter[str] = Counter()
    with torch._C.DisableTorchFunctionSubclass():
        nodes = _graph([*frozen, *new])
        if names:
            for key, number in numbers.items():
                counts[_name(kinds[key])] += number
            counts.update(f"autograd {node.name()}" for node in nodes)
        for name, size in _sizes(objects, [*frozen, *new]) if sizes else ():
            found[name] += size
    return Census(len(frozen) + len(new), len(nodes), numbers.total(), callables, hooks, counts, found)


def _kinds(objects: Iterable[Any]) -> dict[int, type]:
    """Return the types of objects by their ids.

    Some types cannot be hashed, and some import a module when isinstance is called.
    """
    return {id(kind): kind for kind in map(type, objects)}


def _tensor_kinds(kinds: dict[int, type]) -> set[int]:
    return {key for key, kind in kinds.items() if issubclass(kind, Tensor)}


def _is_called(kind: type) -> bool:
    """Return True if objects of a type can be called. Weak references are excluded."""
    return any("__call__" in vars(base) for base in kind.__mro__) and not issubclass(kind, weakref.ref)


def _is_view(kind: type) -> bool:
    return kind is torch.UntypedStorage or any("next_functions" in vars(base) for base in kind.__mro__)


def _sizes(objects: Iterable[Any], tensors: Iterable[Tensor]) -> Iterator[tuple[str, int]]:
    for each in objects:
        if type(each) in _SIZED:
            yield _name(type(each)), sys.getsizeof(each)
    seen: set[int] = set()
    for tensor in tensors:
        try:
            storage = tensor.untyped_storage()
            key, size = storage._cdata, storage.nbytes()
        except (NotImplementedError, RuntimeError):  # sparse, or a wrapper of other tensors
            continue
        # A tensor that torch.compile stores may have a symbolic size.
        if key not in seen and type(size) is int and tensor.device.type != "meta":
            seen.add(key)
            yield _name(type(tensor)), size


def _graph(tensors: Iterable[Tensor]) -> set[Any]:
    """Return the nodes of autograd's graph that are reachable from `tensors`, each once."""
    waiting = [node for node in map(_grad_fn, tensors) if node is not None]
    # The walk holds all nodes, because the Python object of a node is created on access.
    seen = set(waiting)
    while waiting:
        for node, _ in waiting.pop().next_functions:
            if node is not None and node not in seen:
                seen.add(node)
                waiting.append(node)
    return seen


def _grad_fn(tensor: Tensor) -> Any:
    try:
        return tensor.grad_fn
    except RuntimeError:  # a view that was changed in a way that autograd forbids
        return None


def _name(kind: type) -> str:
    module = getattr(kind, "__module__", "?")
    return kind.__qualname__ if module == "builtins" else f"{module}.{kind.__qualname__}"
