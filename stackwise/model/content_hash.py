"""ContentHash: digest of the weights, settings and code of a part of a model."""

from __future__ import annotations

import dataclasses
import enum
import functools
import hashlib
import itertools
import os
import secrets
import sys
import weakref
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import FunctionType, MethodType
from typing import Any

import torch
from pydantic import BaseModel
from torch import Tensor, nn
from torch.nn.modules import module as torch_module

from stackwise.model.attention import Attention
from stackwise.model.latent import LatentAttention
from stackwise.support.arguments import require

__all__ = ["ContentHash", "from_elsewhere", "plain_tensors", "tensor_digest"]

_LARGE = 2**20  # bytes; for smaller tensors SHA-256 is as fast as the quick digest
_WIDTH, _COLUMNS = 2**12, 16
# Attributes that do not affect the output: torch's own on every module; the last backend of attention.
_NO_SETTINGS = {*vars(nn.Module()), "_compiled_call_impl"} - {"training"}
_NO_SETTINGS_OF_ATTENTION = {*_NO_SETTINGS, "backend"}
_PLAIN: tuple[Any, ...] = (type(None), bool, int, float, complex, str, bytes)
_KNOWN = {"pydantic", "torch", "stackwise", *sys.stdlib_module_names}
_MADE_WHILE_RUNNING = 1 << 9  # Py_TPFLAGS_HEAPTYPE
_Function = FunctionType | MethodType
_NO_HOOK = "none, as its code cannot be part of a digest"
_numbers: dict[int, tuple[Callable[[], object], int]] = {}  # by address, while the object is alive
_count = itertools.count()
_process = secrets.token_hex(16)
# The imported code runs, so the files are read at import time.
_OWN_CODE = hashlib.sha256(
    b"".join(path.read_bytes() for path in sorted(Path(__file__).parent.glob("*.py")))
).hexdigest()


def _new_process() -> None:
    global _process
    _process = secrets.token_hex(16)


os.register_at_fork(after_in_child=_new_process)


class ContentHash:
    """SHA-256 digest of everything that the output of some modules depends on.

    torch has no reliable sign of a changed tensor. `_version` misses writes through `.data`, NumPy, DLPack or
    a storage, writes by another process, and the steps of fused AdamW and SGD. A new tensor may have the
    address of an old one. So all bytes are read for each digest. For large tensors, SHA-256 is recomputed
    only if a quicker hash has changed, which runs at about memory bandwidth: the products of int8 rows with
    16 columns of random 7-bit numbers, exact in int32. Two different contents have equal products in one
    column with a probability of at most 1/128: for the number that multiplies a difference, at most one value
    cancels the rest. For all columns it is 2^-112. The columns are drawn in each process and are secret
    (universal hashing, Carter & Wegman 1979).

    The result of a function depends on more than its file, which may have changed since the import, and its
    code: defaults, closures, decorators and everything else that it reaches matter as well. So external code
    (outside this package, torch, pydantic and the standard library) is identified by its objects. A digest of
    a module with external code is valid only in this process.

    Args:
        code_version: name of the external code, instead of its identity. Digests are then valid in other
            processes as well. Change it whenever that code computes a different result.
    """

    def __init__(self, code_version: str | None = None) -> None:
        self._version = code_version
        drawn = torch.frombuffer(bytearray(secrets.token_bytes(_WIDTH * _COLUMNS)), dtype=torch.int8)
        # Seven bits: processors without VNNI add two products in int16, which would overflow with eight bits.
        self._columns = (drawn >> 1).view(_WIDTH, _COLUMNS)
        self._known: dict[bytes, str] = {}

    def __call__(self, modules: Mapping[str, nn.Module]) -> str:
        """Return the digest, in hexadecimal, of modules with names of the caller's choice.

        It includes parameters and buffers by value, shape and dtype, all attributes of modules and of
        external classes, the training mode, compilation, and the code: the files of this package; for
        external classes, the classes, their attributes, and the functions and classes in their Python
        modules. A class attribute that is not a plain value, such as a logger, is identified by its object.
        Not included are functions of this package or of torch that are replaced at run time, and data that
        external code reads outside modules: closure variables, globals, imports and files.

        Raises:
            ValueError: something that cannot be included: a forward hook, also a global one unless it is
                torch's own, or an attribute that is not a plain value.
        """
        hooks = (
            *torch_module._global_forward_hooks.values(),
            *torch_module._global_forward_pre_hooks.values(),
        )
        known = all(isinstance(hook, _Function) and _is_known(hook.__module__) for hook in hooks)
        require(known, "all modules", "a forward hook", _NO_HOOK)
        digest = hashlib.sha256(_OWN_CODE.encode())
        shared: dict[nn.Module, str] = {}
        for name, module in modules.items():
            for fact in self._facts(name, module, shared):
                digest.update(f"{len(fact)} {fact}".encode())
        return digest.hexdigest()

    def _facts(self, name: str, module: nn.Module, shared: dict[nn.Module, str]) -> Iterator[str]:
        for path, part in module.named_modules(prefix=name, remove_duplicate=False):
            yield from self._facts_of_part(path, part, shared)

    def _facts_of_part(self, path: str, module: nn.Module, shared: dict[nn.Module, str]) -> Iterator[str]:
        kind: type = type(module)
        yield f"{path} {self.code_of(kind)} {module._compiled_call_impl is not None}"
        hooked = module._forward_hooks or module._forward_pre_hooks
        require(not hooked, path, "a forward hook", _NO_HOOK)
        keeps_kernel = isinstance(module, Attention | LatentAttention)
        without = _NO_SETTINGS_OF_ATTENTION if keeps_kernel else _NO_SETTINGS
        own = {name: value for name, value in vars(module).items() if name not in without}
        own |= {**module._parameters, **module._buffers}
        of_class = {
            name: value
            for each in reversed(from_elsewhere(kind))
            for name, value in _class_settings(each)
            if name not in vars(module)
        }
        for name, value in of_class.items():
            yield f"{name} {self._text(f'{path}.{name}', value, shared, of_class=True)}"
        for name, value in own.items():
            yield f"{name} {self._text(f'{path}.{name}', value, shared)}"

    def code_of(self, kind: type) -> str:
        """Return the name of a class and, if it is external, its identity."""
        elsewhere = from_elsewhere(kind)
        if not elsewhere:
            return _name(kind)
        names = " ".join(_name(each) for each in kind.__mro__)
        if self._version is not None:
            return f"{names} {self._version!r}"
        return f"{names} {_process} {[number for each in elsewhere for number in _numbers_of(each)]}"

    def _text(
        self,
        path: str,
        value: Any,
        shared: dict[nn.Module, str],
        above: tuple[object, ...] = (),
        *,
        of_class: bool = False,
    ) -> str:
        """Return a value as text. For a class attribute, other objects are allowed as well.

        `shared` has the path at which a module that a class holds was found first: all objects of that class
        share it, and it may contain itself. `above` has the containers of the value, which may contain
        themselves.
        """
        kind = type(value)
        if kind in _PLAIN or isinstance(value, torch.dtype | torch.device):
            return repr(value)
        for depth, each in enumerate(above):
            if each is value:
                return f"above {depth}"
        match value:
            case Tensor():
                return " ".join(f"{self._part(p)} {self._digest(plain)}" for p, plain in plain_tensors(value))
            case nn.Module():
                first = shared.setdefault(value, path)
                facts = self._facts(path, value, shared) if first == path else ()
                return f"{first} {' '.join(f'{len(fact)} {fact}' for fact in facts)}"
            case type():
                return self.code_of(value)
        text = functools.partial(self._text, path, shared=shared, above=(*above, value), of_class=of_class)
        if kind is list:
            return f"[{', '.join(map(text, value))}]"
        content = _content(value, text)
        if content is not None:
            return f"{self.code_of(kind)} {text(content)}"
        if of_class:
            return self._object(value)
        allowed = "a plain value, a tensor, a class or a module"
        raise ValueError(f"{path}: got {kind.__name__}; allowed: {allowed}")

    def _object(self, value: object) -> str:
        if self._version is None:
            return f"{_process} {_number(value)}"
        return _name(value if hasattr(value, "__qualname__") else type(value))

    def _part(self, part: tuple[type | str, ...]) -> str:
        return " ".join(each if isinstance(each, str) else self.code_of(each) for each in part)

    @torch.no_grad()
    def _digest(self, tensor: Tensor) -> str:
        has_product = tensor.is_cuda or (tensor.device.type == "cpu" and torch._C._has_mkldnn)
        if tensor.nbytes < _LARGE or not has_product:
            return tensor_digest(tensor)
        quick = self._quick_digest(tensor)
        known = self._known.get(quick)
        if known is None:
            known = tensor_digest(tensor)
            if self._quick_digest(tensor) == quick:  # no write between the two digests
                if len(self._known) >= 2**12:
                    self._known.clear()
                self._known[quick] = known
        return known

    def _quick_digest(self, tensor: Tensor) -> bytes:
        raw_n = _raw(tensor)
        whole = raw_n.numel() - raw_n.numel() % _WIDTH
        rows = raw_n[:whole].view(torch.int8).view(-1, _WIDTH)
        sums = torch._int_mm(rows, self._columns.to(rows.device))
        digest = hashlib.sha256(_header(tensor))
        digest.update(_buffer(sums))
        digest.update(_buffer(raw_n[whole:]))
        return digest.digest()


def plain_tensors(tensor: Tensor) -> Iterator[tuple[tuple[type | str, ...], Tensor]]:
    """Yield the plain tensors of a tensor, each with its path in it. A plain tensor yields itself."""
    if not hasattr(tensor, "__tensor_flatten__"):
        yield (), tensor.detach()
        return
    names, context = tensor.__tensor_flatten__()
    for name in names:
        for part, inner in plain_tensors(getattr(tensor, name)):
            yield (type(tensor), str(context), name, *part), inner


def tensor_digest(tensor: Tensor) -> str:
    """Return the SHA-256, in hexadecimal, of the values, shape and dtype of a plain tensor."""
    digest = hashlib.sha256(_header(tensor))
    digest.update(_buffer(_raw(tensor)))
    return digest.hexdigest()


@functools.lru_cache(2**10)
def from_elsewhere(kind: type) -> list[type]:
    """Return a class and its bases, without the ones of this package, torch, pydantic and Python."""
    return [each for each in kind.__mro__ if not _is_known(each.__module__) or _is_executed(each)]


def _is_known(module: str | None) -> bool:
    return module is not None and module.partition(".")[0] in _KNOWN


def _is_executed(kind: type) -> bool:
    """Return True if a class comes from code executed without a `__name__`: its module is `builtins`."""
    return kind.__module__ == "builtins" and bool(kind.__flags__ & _MADE_WHILE_RUNNING)


def _name(kind: Any) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"


def _numbers_of(kind: type) -> list[int]:
    """Return the identities of a class, its functions and descriptors, and its module's callables."""
    beside = getattr(sys.modules.get(kind.__module__), "__dict__", {})
    own = [value for value in vars(kind).values() if callable(value) or hasattr(type(value), "__get__")]
    others = [value for value in beside.values() if callable(value) and not isinstance(value, nn.Module)]
    return [_number(value) for value in (kind, *own, *others)]


def _number(value: object) -> int:
    known = _numbers.get(id(value))
    if known is None or known[0]() is not value:
        try:
            held: Callable[[], object] = weakref.ref(value)
        except TypeError:
            held = functools.partial(_itself, value)
        known = _numbers[id(value)] = held, next(_count)
    return known[1]


def _itself(value: object) -> object:
    return value


def _class_settings(kind: type) -> Iterator[tuple[str, Any]]:
    """Yield the attributes of a class that are not code: functions, properties and other descriptors."""
    for name, value in vars(kind).items():
        if not name.startswith("__") and not hasattr(type(value), "__get__"):
            yield name, value


def _content(value: Any, text: Callable[[Any], str]) -> list[Any] | None:
    """Return the content of a value and the attributes of a subclass. None: the value is not plain."""
    match value:
        case enum.Enum():
            return [vars(value)]
        case int() | float() | complex() | str() | bytes():
            content = [next(base.__repr__(value) for base in _PLAIN if isinstance(value, base))]
        case bytearray():
            content = [bytes(value)]
        case dict():
            content = [*map(list, value.items()), getattr(value, "default_factory", None)]
        case set() | frozenset():
            content = sorted(map(text, value))
        case tuple() | list():
            content = list(value)
        case BaseModel():
            return [dict(value)]
        case _ if dataclasses.is_dataclass(value):
            fields = {each.name: getattr(value, each.name) for each in dataclasses.fields(value)}
            return [fields | getattr(value, "__dict__", {})]  # no __dict__ with slots
        case _:
            return None
    return [*content, getattr(value, "__dict__", None)]


def _header(tensor: Tensor) -> bytes:
    return f"{tensor.dtype} {tuple(tensor.shape)} ".encode()


def _raw(tensor: Tensor) -> Tensor:
    """Return the values as bytes, in index order: uint8 (n,)."""
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


def _buffer(tensor: Tensor) -> memoryview:
    return tensor.cpu().numpy().data.cast("B") if tensor.numel() else memoryview(b"")
