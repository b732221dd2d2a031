"""ContentHash: what part of a model computes, as a digest of its weights, settings and code."""

from __future__ import annotations

import dataclasses
import enum
import functools
import hashlib
import secrets
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import BuiltinFunctionType, FunctionType
from typing import Any

import torch
from pydantic import BaseModel
from torch import Tensor, nn
from torch.nn.modules import module as torch_module

from stackwise.argument import require
from stackwise.model.attention import Attention
from stackwise.model.latent import LatentAttention
from stackwise.model.running_code import from_elsewhere, is_from_elsewhere, parts_of, wrapped_parts

__all__ = ["ContentHash", "plain_tensors", "tensor_digest"]

_LARGE = 2**20  # bytes; below, SHA-256 takes no longer than what would spare it
_WIDTH, _COLUMNS = 2**12, 16
_NO_HOOK = "none, as its code cannot be part of a digest"
# Not what is computed: what torch keeps on every module; on attention the kernel of the last pass.
_NO_SETTINGS = {*vars(nn.Module()), "_compiled_call_impl"} - {"training"}
_NO_SETTINGS_OF_ATTENTION = {*_NO_SETTINGS, "backend"}
# What runs is what was imported, so the files are read when they are.
_OWN_CODE = hashlib.sha256(
    b"".join(path.read_bytes() for path in sorted(Path(__file__).parent.glob("*.py")))
).hexdigest()


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
    """

    def __init__(self) -> None:
        drawn = torch.frombuffer(bytearray(secrets.token_bytes(_WIDTH * _COLUMNS)), dtype=torch.int8)
        # Seven bits: processors without VNNI add two products in int16, which eight bits would overflow.
        self._columns = (drawn >> 1).view(_WIDTH, _COLUMNS)
        self._known: dict[bytes, str] = {}

    def __call__(self, modules: Mapping[str, nn.Module]) -> str:
        """The digest, in hexadecimal, of modules under names of the caller's choice.

        In it are parameters and buffers by value, shape and dtype, all attributes that modules have of
        their own and those of classes from elsewhere, the mode, whether it is compiled, and the code: the
        files of this package, and of classes from elsewhere but torch the functions as they are now, with
        the globals of their own module that they name, and the files. What is compiled, such as a builtin
        function, counts by name; so does what is no plain value on a class, such as a logger, by that of its
        class. Functions of this package or of torch that are replaced while the process runs are not seen,
        nor what code from elsewhere reads beside its own module: its imports, files.

        Raises:
            ValueError: what cannot be in it: a forward hook, an attribute that is no plain value.
        """
        hooked = torch_module._global_forward_hooks or torch_module._global_forward_pre_hooks
        require(not hooked, "all modules", "a forward hook", _NO_HOOK)
        digest = hashlib.sha256(_OWN_CODE.encode())
        shared: dict[object, str] = {}
        for name, module in modules.items():
            for fact in self._facts(name, module, shared):
                digest.update(f"{len(fact)} {fact}".encode())
        return digest.hexdigest()

    def code_of(self, kind: type) -> str:
        """What a class is called and, where it is from elsewhere, what it runs."""
        return self._code("class", kind, {})

    def _facts(self, name: str, module: nn.Module, shared: dict[object, str]) -> Iterator[str]:
        for path, part in module.named_modules(prefix=name, remove_duplicate=False):
            yield from self._facts_of_part(path, part, shared)

    def _facts_of_part(self, path: str, module: nn.Module, shared: dict[object, str]) -> Iterator[str]:
        kind: type = type(module)
        code = self._code(path, kind, shared, settings=False)
        yield f"{path} {code} {module._compiled_call_impl is not None}"
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

    def _text(self, path: str, value: Any, shared: dict[object, str], *, of_class: bool = False) -> str:
        """A value in full; of a class also what is no value, by the name and code of its own class.

        `shared` says where a module that is held by a class, a class or a function was met first: all
        objects of a class have what it has, perhaps itself among them.
        """
        text = functools.partial(self._text, path, shared=shared, of_class=of_class)
        match value:
            case None | bool() | int() | float() | complex() | str() | bytes():
                return repr(value)
            case torch.dtype() | torch.device():
                return repr(value)
            case enum.Enum():
                return f"{self._code(path, type(value), shared)} {value!r}"
            case Tensor():
                return " ".join(f"{text(part)} {self._digest(plain)}" for part, plain in plain_tensors(value))
            case nn.Module():
                first = shared.setdefault(value, path)
                facts = self._facts(path, value, shared) if first == path else ()
                return f"{first} {' '.join(f'{len(fact)} {fact}' for fact in facts)}"
            case type():
                return self._code(path, value, shared)
            case FunctionType() if of_class:
                return self._code(path, value, shared)
            case BuiltinFunctionType() if of_class:
                return f"{value.__module__}.{value.__qualname__}"
            case dict():
                inner: Any = [(key, value[key]) for key in sorted(value, key=repr)]
            case set() | frozenset():
                inner = sorted(map(text, sorted(value, key=repr)))
            case tuple() | list():
                return f"[{', '.join(map(text, value))}]"
            case BaseModel():
                inner = dict(value)
            case _ if dataclasses.is_dataclass(value):
                inner = {each.name: getattr(value, each.name) for each in dataclasses.fields(value)}
                inner |= getattr(value, "__dict__", {})  # none where it has slots
            case _ if of_class:
                inner = wrapped_parts(value)
            case _:
                allowed = "a plain value, a tensor, a class or a module"
                raise ValueError(f"{path}: got {type(value).__name__}; allowed: {allowed}")
        return f"{self._code(path, type(value), shared)} {text(inner)}"

    def _code(
        self, path: str, code: type | FunctionType, shared: dict[object, str], *, settings: bool = True
    ) -> str:
        """A class or function by name and, from elsewhere and where it is met first, what it consists of."""
        name = f"{code.__module__}.{code.__qualname__}"
        if not is_from_elsewhere(code):
            return name
        if code in shared:
            return f"{name} {shared[code]}"
        shared[code] = f"number {len(shared)}"
        return f"{name} {self._text(path, parts_of(code, settings=settings), shared, of_class=True)}"

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


def plain_tensors(tensor: Tensor) -> Iterator[tuple[tuple[Any, ...], Tensor]]:
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
