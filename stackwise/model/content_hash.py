"""ContentHash: what part of a model computes, as a digest of its weights, settings and code."""

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

_LARGE = 2**20  # bytes; below, SHA-256 takes no longer than what would spare it
_WIDTH, _COLUMNS = 2**12, 16
# Not what is computed: what torch keeps on every module; on attention the kernel of the last pass.
_NO_SETTINGS = {*vars(nn.Module()), "_compiled_call_impl"} - {"training"}
_NO_SETTINGS_OF_ATTENTION = {*_NO_SETTINGS, "backend"}
_PLAIN: tuple[Any, ...] = (type(None), bool, int, float, complex, str, bytes)
_KNOWN = {"pydantic", "torch", "stackwise", *sys.stdlib_module_names}
_MADE_WHILE_RUNNING = 1 << 9  # Py_TPFLAGS_HEAPTYPE
_Function = FunctionType | MethodType
_NO_HOOK = "none, as its code cannot be part of a digest"
_numbers: dict[int, tuple[Callable[[], object], int]] = {}  # by address, as long as it is the same object
_count = itertools.count()
_process = secrets.token_hex(16)
# What runs is what was imported, so the files are read when they are.
_OWN_CODE = hashlib.sha256(
    b"".join(path.read_bytes() for path in sorted(Path(__file__).parent.glob("*.py")))
).hexdigest()


def _new_process() -> None:
    global _process
    _process = secrets.token_hex(16)


os.register_at_fork(after_in_child=_new_process)


class ContentHash:
    """SHA-256 over everything that the output of some modules depends on.

    Nothing that torch keeps about a tensor says whether its numbers have changed: `_version` does not see
    writes through `.data`, NumPy, DLPack or a storage, nor from another process, nor the steps of fused
    AdamW and SGD; and a new tensor may lie where an old one lay. So all bytes are read each time. For large
    tensors SHA-256 is computed anew only when another hash changes, which reads them about as fast as
    memory gives them: the products of rows of int8 with 16 columns of random numbers of 7 bits, exact
    in int32. Two different contents agree in one column with a probability of at most 1/128, since of the
    values of the number that meets a difference at most one cancels the rest; in all columns, 2^-112.
    The columns are drawn in each process and told to nobody (universal hashing, Carter & Wegman 1979).

    What a function computes shows neither in its file, which may have been edited since, nor in its code
    alone: defaults, closures, decorators and whatever else it reaches decide as well. So code from elsewhere
    counts by identity, and a digest of a module that has some holds in this process alone.

    Args:
        code_version: what code from elsewhere is called, in place of its identity: digests then hold in
            other processes too, and it has to be another one whenever that code computes something else.
    """

    def __init__(self, code_version: str | None = None) -> None:
        self._version = code_version
        drawn = torch.frombuffer(bytearray(secrets.token_bytes(_WIDTH * _COLUMNS)), dtype=torch.int8)
        # Seven bits: processors without VNNI add two products in int16, which eight bits would overflow.
        self._columns = (drawn >> 1).view(_WIDTH, _COLUMNS)
        self._known: dict[bytes, str] = {}

    def __call__(self, modules: Mapping[str, nn.Module]) -> str:
        """The digest, in hexadecimal, of modules under names of the caller's choice.

        In it are parameters and buffers by value, shape and dtype, all attributes that modules have of
        their own and those of classes from elsewhere, the mode, whether it is compiled, and the code: the
        files of this package, and of classes from elsewhere but torch the classes themselves, all that is
        in them, and the functions and classes that their modules have. What is no plain value on a class,
        such as a logger, counts by its identity, too. Not seen are functions of this package or of torch
        that are replaced while the process runs, nor what code from elsewhere reads that is in no module:
        variables that it closes over or finds in its module, its imports, files.

        Raises:
            ValueError: what cannot be in it: a forward hook, also one for all modules unless it is torch's
                own, or an attribute that is no plain value.
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
        """What a class is called and, from elsewhere, which one it is."""
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
        """A value in full; of a class also what is no value.

        `shared` says where a module that is held by a class was met first: all objects of that class have
        it, perhaps itself among them. `above` is what a value is in, which may be in it.
        """
        kind = type(value)
        if kind in _PLAIN:
            return repr(value)
        for depth, each in enumerate(above):
            if each is value:
                return f"above {depth}"
        text = functools.partial(self._text, path, shared=shared, above=(*above, value), of_class=of_class)
        inner: Any
        match value:
            case torch.dtype() | torch.device():
                return repr(value)
            case Tensor():
                parts = [(self._part(part), self._digest(plain)) for part, plain in plain_tensors(value)]
                return " ".join(f"{part} {digest}" for part, digest in parts)
            case nn.Module():
                first = shared.setdefault(value, path)
                facts = self._facts(path, value, shared) if first == path else ()
                return f"{first} {' '.join(f'{len(fact)} {fact}' for fact in facts)}"
            case type():
                return self.code_of(value)
            case list() if kind is list:
                return f"[{', '.join(map(text, value))}]"
            case enum.Enum():
                inner = vars(value)
            case int() | float() | complex() | str() | bytes():
                inner = [next(base.__repr__(value) for base in _PLAIN if isinstance(value, base))]
            case bytearray():
                inner = bytes(value)
            case dict():
                inner = [[key, each] for key, each in value.items()]
                inner += [getattr(value, "default_factory", None)]
            case set() | frozenset():
                inner = sorted(map(text, value))
            case tuple() | list():
                inner = list(value)
            case BaseModel():
                return f"{self.code_of(kind)} {text(dict(value))}"
            case _ if dataclasses.is_dataclass(value):
                inner = {each.name: getattr(value, each.name) for each in dataclasses.fields(value)}
                inner |= getattr(value, "__dict__", {})  # none where it has slots
                return f"{self.code_of(kind)} {text(inner)}"
            case _ if of_class:
                return self._object(value)
            case _:
                allowed = "a plain value, a tensor, a class or a module"
                raise ValueError(f"{path}: got {kind.__name__}; allowed: {allowed}")
        beside = None if isinstance(value, enum.Enum) else getattr(value, "__dict__", None)
        return f"{self.code_of(kind)} {text(inner)}{f' {text(beside)}' if beside else ''}"

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
            if self._quick_digest(tensor) == quick:  # nobody wrote to it between the two
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
    """The tensors that a tensor is made of, each with what it is a part of; a plain one is made of itself."""
    if not hasattr(tensor, "__tensor_flatten__"):
        yield (), tensor.detach()
        return
    names, context = tensor.__tensor_flatten__()
    for name in names:
        for part, inner in plain_tensors(getattr(tensor, name)):
            yield (type(tensor), str(context), name, *part), inner


def tensor_digest(tensor: Tensor) -> str:
    """SHA-256, in hexadecimal, of values, shape and dtype of a tensor that has no parts."""
    digest = hashlib.sha256(_header(tensor))
    digest.update(_buffer(_raw(tensor)))
    return digest.hexdigest()


@functools.lru_cache(2**10)
def from_elsewhere(kind: type) -> list[type]:
    """A class and its bases, but those of this package, of torch and of Python."""
    return [each for each in kind.__mro__ if not _is_known(each.__module__) or _is_executed(each)]


def _is_known(module: str | None) -> bool:
    return module is not None and module.partition(".")[0] in _KNOWN


def _is_executed(kind: type) -> bool:
    """Whether it is of code that was executed without a `__name__`: such a class says it is of builtins."""
    return kind.__module__ == "builtins" and bool(kind.__flags__ & _MADE_WHILE_RUNNING)


def _name(kind: Any) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"


def _numbers_of(kind: type) -> list[int]:
    """Which objects they are: a class, what can be called in it, and what its module has of that kind."""
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
    """The attributes of a class that are no code: functions, properties and their like bind to an object."""
    for name, value in vars(kind).items():
        if not name.startswith("__") and not hasattr(type(value), "__get__"):
            yield name, value


def _header(tensor: Tensor) -> bytes:
    return f"{tensor.dtype} {tuple(tensor.shape)} ".encode()


def _raw(tensor: Tensor) -> Tensor:
    """The values as bytes, in the order of the indices: uint8 (n,)."""
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


def _buffer(tensor: Tensor) -> memoryview:
    return tensor.cpu().numpy().data.cast("B") if tensor.numel() else memoryview(b"")
