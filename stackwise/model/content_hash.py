"""ContentHash: what part of a model computes, as a digest of its weights, settings and code."""

from __future__ import annotations

import dataclasses
import enum
import functools
import hashlib
import secrets
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import BuiltinFunctionType, CodeType, FunctionType
from typing import Any

import torch
from pydantic import BaseModel
from torch import Tensor, nn

from stackwise.argument import require
from stackwise.model.attention import Attention
from stackwise.model.latent import LatentAttention

__all__ = ["ContentHash", "code_of", "from_elsewhere", "plain_tensors", "tensor_digest"]

_LARGE = 2**20  # bytes; below, SHA-256 takes no longer than what would spare it
_WIDTH, _COLUMNS = 2**12, 16
# Not what is computed: what torch keeps on every module; on attention the kernel of the last pass.
_NO_SETTINGS = {*vars(nn.Module()), "_compiled_call_impl"} - {"training"}
_NO_SETTINGS_OF_ATTENTION = {*_NO_SETTINGS, "backend"}
_KNOWN = {"pydantic", "torch", "stackwise", *sys.stdlib_module_names}
_digests: dict[int, tuple[CodeType, str]] = {}  # by identity: code that is equal may differ
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
        files of this package, and of classes from elsewhere but torch the files, and the functions as they
        are now. Classes and builtin functions count by name; so does what is no plain value on a class, such
        as a logger, by that of its class. Functions of this package or of torch that are replaced while the
        process runs are not seen, nor what code from elsewhere reads that is in no module: its globals, its
        imports, files.

        Raises:
            ValueError: what cannot be in it: a forward hook, an attribute that is no plain value, a class
                that comes from no file.
        """
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
        yield f"{path} {code_of(kind)} {module._compiled_call_impl is not None}"
        hooked = module._forward_hooks or module._forward_pre_hooks
        require(not hooked, path, "a forward hook", "none, as its code cannot be part of a digest")
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

    def _text(self, path: str, value: Any, shared: dict[nn.Module, str], *, of_class: bool = False) -> str:
        """A value in full; of a class also what is no value, by the name and code of its own class.

        `shared` says where a module that is held by a class was met first: all objects of that class have
        it, perhaps itself among them.
        """
        text = functools.partial(self._text, path, shared=shared, of_class=of_class)
        match value:
            case None | bool() | int() | float() | str() | bytes():
                return repr(value)
            case enum.Enum() | torch.dtype() | torch.device():
                return repr(value)
            case Tensor():
                return " ".join(f"{part} {self._digest(plain)}" for part, plain in plain_tensors(value))
            case nn.Module():
                first = shared.setdefault(value, path)
                facts = self._facts(path, value, shared) if first == path else ()
                return f"{first} {' '.join(f'{len(fact)} {fact}' for fact in facts)}"
            case type():
                return code_of(value)
            case BuiltinFunctionType() if of_class:
                return f"{value.__module__}.{value.__qualname__}"
            case dict():
                inner: Any = [(key, value[key]) for key in sorted(value, key=repr)]
            case set() | frozenset():
                return f"{code_of(type(value))} {sorted(map(text, value))}"
            case tuple() | list():
                return f"[{', '.join(map(text, value))}]"
            case BaseModel():
                inner = dict(value)
            case _ if dataclasses.is_dataclass(value):
                inner = {each.name: getattr(value, each.name) for each in dataclasses.fields(value)}
                inner |= getattr(value, "__dict__", {})  # none where it has slots
            case _ if of_class:
                inner = None
            case _:
                allowed = "a plain value, a tensor, a class or a module"
                raise ValueError(f"{path}: got {type(value).__name__}; allowed: {allowed}")
        return f"{code_of(type(value))} {text(inner)}"

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


def plain_tensors(tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
    """The tensors that a tensor is made of, each with what it is a part of; a plain one is made of itself."""
    if not hasattr(tensor, "__tensor_flatten__"):
        yield "", tensor.detach()
        return
    names, context = tensor.__tensor_flatten__()
    for name in names:
        for text, inner in plain_tensors(getattr(tensor, name)):
            yield f"{code_of(type(tensor))} {context} {name} {text}", inner


def tensor_digest(tensor: Tensor) -> str:
    """SHA-256, in hexadecimal, of values, shape and dtype of a tensor that has no parts."""
    digest = hashlib.sha256(_header(tensor))
    digest.update(_buffer(_raw(tensor)))
    return digest.hexdigest()


def code_of(kind: type) -> str:
    """What a class is called, and a digest of what it and its bases from elsewhere run.

    Of each that is its functions and those of its module as they are in memory, and the file: one that was
    edited since it was imported is not what runs, and a module that was reloaded runs another.

    Raises:
        ValueError: a class that comes from no file.
    """
    texts = [f"{kind.__module__}.{kind.__qualname__}"]
    for each in from_elsewhere(kind):
        module = sys.modules.get(each.__module__)
        file = getattr(module, "__file__", None)
        allowed = "one that comes from a file, so that its code can be part of a digest"
        require(file is not None, "class", each.__qualname__, allowed)
        beside = {name: value for name, value in vars(module).items() if _is_function_of(value, module)}
        functions = (_code_digest(function) for function in (*_functions(vars(each)), *_functions(beside)))
        texts += [_file_digest(str(file)), hashlib.sha256("".join(functions).encode()).hexdigest()]
    return " ".join(texts)


@functools.lru_cache(2**10)
def from_elsewhere(kind: type) -> list[type]:
    """A class and its bases, but those of this package, of torch and of Python."""
    return [each for each in kind.__mro__ if each.__module__.partition(".")[0] not in _KNOWN]


def _class_settings(kind: type) -> Iterator[tuple[str, Any]]:
    """The attributes of a class that are no code: functions, properties and their like bind to an object."""
    for name, value in vars(kind).items():
        if not name.startswith("__") and not hasattr(type(value), "__get__"):
            yield name, value


def _file_digest(path: str) -> str:
    about = Path(path).stat()
    return _digest_of_file(path, about.st_mtime_ns, about.st_size)


@functools.lru_cache(2**10)
def _digest_of_file(path: str, _mtime_ns: int, _size: int) -> str:
    return hashlib.sha256(Path(path).read_bytes()).hexdigest()


def _is_function_of(value: object, module: object) -> bool:
    return isinstance(value, FunctionType) and value.__module__ == getattr(module, "__name__", None)


def _functions(namespace: Mapping[str, Any]) -> Iterator[CodeType]:
    """The code of what is called by a name, in the order of the names."""
    for _, value in sorted(namespace.items()):
        parts = (value.fget, value.fset, value.fdel) if isinstance(value, property) else (value,)
        for part in parts:
            function = getattr(part, "__func__", part)  # of a class method, or a static one
            if isinstance(function, FunctionType):
                yield function.__code__


def _code_digest(code: CodeType) -> str:
    """Of what it does, and not of where it was written."""
    known = _digests.get(id(code))
    if known is None or known[0] is not code:
        constants = [_code_digest(c) if isinstance(c, CodeType) else _constant(c) for c in code.co_consts]
        facts = (code.co_code, code.co_exceptiontable, code.co_names, code.co_varnames, constants)
        known = _digests[id(code)] = code, hashlib.sha256(repr(facts).encode()).hexdigest()
    return known[1]


def _constant(value: object) -> str:
    # The order of a set is another one in each process.
    return repr(sorted(map(repr, value))) if isinstance(value, frozenset) else repr(value)


def _header(tensor: Tensor) -> bytes:
    return f"{tensor.dtype} {tuple(tensor.shape)} ".encode()


def _raw(tensor: Tensor) -> Tensor:
    """The values as bytes, in the order of the indices: uint8 (n,)."""
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


def _buffer(tensor: Tensor) -> memoryview:
    return tensor.cpu().numpy().data.cast("B") if tensor.numel() else memoryview(b"")
