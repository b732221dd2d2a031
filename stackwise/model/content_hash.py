"""ContentHash: what part of a model computes, as a digest of its weights, settings and code."""

from __future__ import annotations

import contextlib
import copyreg
import dataclasses
import enum
import functools
import hashlib
import secrets
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import (
    BuiltinFunctionType,
    CellType,
    CodeType,
    FunctionType,
    GetSetDescriptorType,
    MemberDescriptorType,
    MethodDescriptorType,
    MethodType,
    ModuleType,
    WrapperDescriptorType,
)
from typing import Any, Literal

import torch
from pydantic import BaseModel
from torch import Tensor, nn
from torch.nn.modules import module as torch_module

from stackwise.argument import require
from stackwise.model.attention import Attention
from stackwise.model.latent import LatentAttention

__all__ = ["ContentHash", "from_elsewhere", "plain_tensors", "tensor_digest"]

_LARGE = 2**20  # bytes; below, SHA-256 takes no longer than what would spare it
_WIDTH, _COLUMNS = 2**12, 16
# Not what is computed: what torch keeps on every module; on attention the kernel of the last pass.
_NO_SETTINGS = {*vars(nn.Module()), "_compiled_call_impl"} - {"training"}
_NO_SETTINGS_OF_ATTENTION = {*_NO_SETTINGS, "backend"}
_KNOWN = {"pydantic", "torch", "stackwise", *sys.stdlib_module_names}
_MADE_WHILE_RUNNING = 1 << 9  # Py_TPFLAGS_HEAPTYPE
_NO_HOOK = "none, as its code cannot be part of a digest"
_TOLD = "a plain value, a tensor, a class or a module"
_TOLD_OF_CODE = f"{_TOLD}, a function, or what can be pickled"
_Native = (
    BuiltinFunctionType
    | GetSetDescriptorType
    | MemberDescriptorType
    | MethodDescriptorType
    | WrapperDescriptorType
)
_HeldBy = Literal["module", "class", "code"]
# By identity: code that is equal may differ. What code consists of never changes.
_known_code: dict[int, tuple[CodeType, str, list[str]]] = {}
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
        are now: with their defaults, what they close over and wrap, and the functions and classes that they
        name of their own module, with theirs in turn. Other classes and builtin functions count by name; so
        does what is no plain value on a class, such as a logger, by that of its class. Functions of this
        package or of torch that are replaced while the process runs are not seen, nor what else code from
        elsewhere reads that is in no module: its globals, its imports, files.

        Raises:
            ValueError: what cannot be in it: a forward hook, an attribute that is no plain value, what a
                function holds that is neither one nor can be pickled, a class that comes from no file.
        """
        hooked = torch_module._global_forward_hooks or torch_module._global_forward_pre_hooks
        require(not hooked, "all modules", "a forward hook", _NO_HOOK)
        digest, met = hashlib.sha256(_OWN_CODE.encode()), _Met()
        for name, module in modules.items():
            for fact in self._facts(name, module, met):
                digest.update(f"{len(fact)} {fact}".encode())
        for fact in self._facts_of_met(met):
            digest.update(f"{len(fact)} {fact}".encode())
        return digest.hexdigest()

    def code_of(self, kind: type) -> str:
        """What a class is called and, from elsewhere, a digest of what it and its bases are and run.

        Raises:
            ValueError: what a digest of a module that has it cannot hold.
        """
        met = _Met()
        return " ".join([self._class(kind, met), *self._facts_of_met(met)])

    def _facts(self, name: str, module: nn.Module, met: _Met) -> Iterator[str]:
        for path, part in module.named_modules(prefix=name, remove_duplicate=False):
            yield from self._facts_of_part(path, part, met)

    def _facts_of_part(self, path: str, module: nn.Module, met: _Met) -> Iterator[str]:
        kind: type = type(module)
        code = self._class(kind, met, settings=False)
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
            yield f"{name} {self._text(f'{path}.{name}', value, met, 'class')}"
        for name, value in own.items():
            yield f"{name} {self._text(f'{path}.{name}', value, met)}"

    def _facts_of_met(self, met: _Met) -> Iterator[str]:
        """What was met, each once, and what is met in turn; not where it is met, as that may be deep."""
        for number, (what, path, value) in enumerate(met.all):
            yield f"{what} {number}"
            match what:
                case "module":
                    yield from self._facts(path, value, met)
                case "code":
                    yield from self._facts_of_class(value, met)
                case "settings":
                    for name, held in _class_settings(value):
                        text = self._text(f"{value.__qualname__}.{name}", held, met, "class")
                        yield f"{name} {text}"
                case "function":
                    yield from self._facts_of_function(value, met)
                case _:
                    yield self._text(path, _pickled(path, value), met, "code")

    def _facts_of_class(self, kind: type, met: _Met) -> Iterator[str]:
        """Of its functions and those of its module as they are in memory, and the file.

        A file that was edited since it was imported is not what runs, and a module that was reloaded runs
        another.
        """
        module = sys.modules.get(kind.__module__)
        file = getattr(module, "__file__", None)
        allowed = "one that comes from a file, so that its code can be part of a digest"
        require(file is not None, "class", kind.__qualname__, allowed)
        # All of them by what they run, as they may be called by what is no name in the code.
        beside = sorted((name, f) for name, f in vars(module).items() if _is_function_of(f, module))
        digests = "".join(_of_code(function.__code__)[0] for _, function in beside)
        yield f"{_file_digest(str(file))} {hashlib.sha256(digests.encode()).hexdigest()}"
        for name, value in vars(kind).items():
            if hasattr(type(value), "__get__"):
                # What Python and pydantic keep is no code of one's own, unless it is a function.
                held_by: _HeldBy = "class" if name.startswith("__") else "code"
                yield f"{name} {self._text(f'{kind.__qualname__}.{name}', value, met, held_by)}"

    def _facts_of_function(self, function: FunctionType, met: _Met) -> Iterator[str]:
        digest, names = _of_code(function.__code__)
        text = functools.partial(self._text, met=met, held_by="code")
        yield digest
        path, own = function.__qualname__, function.__globals__
        for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
            value = _content(cell)
            # For `super`, which does not ask what the class has set.
            of_super = name == "__class__" and isinstance(value, type)
            yield self._class(value, met, settings=False) if of_super else text(f"{path}.{name}", value)
        yield text(f"{path}.__defaults__", function.__defaults__)
        yield text(f"{path}.__kwdefaults__", function.__kwdefaults__)
        yield text(f"{path}.__dict__", vars(function))
        if not _is_known(own.get("__name__")):
            for name in names:
                value = own.get(name)
                is_code = isinstance(value, FunctionType | type | functools._lru_cache_wrapper)
                if is_code and value.__module__ == own.get("__name__"):
                    yield f"{name} {text(name, value)}"

    def _class(self, kind: type, met: _Met, *, settings: bool = True) -> str:
        """A class by its name; from elsewhere also by its bases, and what it and they are and run."""
        elsewhere = from_elsewhere(kind)
        if not elsewhere:
            return _name(kind)
        parts = [_name(each) for each in kind.__mro__]
        parts += [met.number("code", "class", each) for each in elsewhere]
        parts += [met.number("settings", "class", each) for each in elsewhere if settings]
        return " ".join(parts)

    def _text(self, path: str, value: Any, met: _Met, held_by: _HeldBy = "module") -> str:
        """A value in full.

        What has none is refused, but of a class it counts by the name and code of its own class; held by
        code it counts by what it would be pickled as, so that two closures are told apart.
        """
        text = functools.partial(self._text, path, met=met, held_by=held_by)
        match value:
            case None | bool() | int() | float() | complex() | str() | bytes():
                return repr(value)
            case enum.Enum() | torch.dtype() | torch.device():
                return repr(value)
            case Tensor():
                parts = (
                    (self._parts(part, met), self._digest(plain)) for part, plain in plain_tensors(value)
                )
                return " ".join(f"{part} {digest}" for part, digest in parts)
            case nn.Module():
                return met.number("module", path, value)
            case type():
                return self._class(value, met)
            case FunctionType() if held_by != "module":
                return _name(value) if _is_found_by_name(value) else met.number("function", path, value)
            case ModuleType() if held_by != "module":
                return value.__name__
            case _ if held_by != "module" and _is_native(value):
                return _name(value)
            case _ if held_by != "module" and (code := _wrapped(value)):
                return f"{_name(type(value))} {self._text(path, code, met, 'code')}"
            case dict():
                inner: Any = [(key, value[key]) for key in sorted(value, key=repr)]
            case set() | frozenset():
                return f"{self._class(type(value), met)} {sorted(map(text, value))}"
            case tuple() | list():
                return f"[{', '.join(map(text, value))}]"
            case BaseModel():
                inner = dict(value)
            case _ if dataclasses.is_dataclass(value):
                inner = {each.name: getattr(value, each.name) for each in dataclasses.fields(value)}
                inner |= getattr(value, "__dict__", {})  # none where it has slots
            case _ if held_by == "class":
                inner = None
            case _ if held_by == "code":
                return met.number("object", path, value)
            case _:
                raise ValueError(f"{path}: got {type(value).__name__}; allowed: {_TOLD}")
        return f"{self._class(type(value), met)} {text(inner)}"

    def _parts(self, part: tuple[type | str, ...], met: _Met) -> str:
        texts = (each if isinstance(each, str) else self._class(each, met, settings=False) for each in part)
        return " ".join(texts)

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


class _Met:
    """What was met on the way, under numbers: it may hold itself, and what many hold is read once.

    Attributes:
        all: by number what it is, where it was met first, and the object, which keeps its identity so.
    """

    def __init__(self) -> None:
        self.all: list[tuple[str, str, Any]] = []
        self._numbers: dict[tuple[str, int], int] = {}

    def number(self, what: str, path: str, value: object) -> str:
        number = self._numbers.setdefault((what, id(value)), len(self.all))
        if number == len(self.all):
            self.all.append((what, path, value))
        return f"{what} {number}"


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


def _is_found_by_name(function: FunctionType) -> bool:
    """Whether a function is of this package, of torch or of Python, and not made there for somebody else."""
    # A wrapper says that it is of the module of what it wraps; its globals are where it was written.
    if not (_is_known(function.__module__) and _is_known(function.__globals__.get("__name__"))):
        return False
    found: Any = sys.modules.get(function.__module__)
    for name in function.__qualname__.split("."):
        found = getattr(found, name, None)
    return found is function


def _is_native(value: object) -> bool:
    """Whether it is compiled, and has nothing but its name: not a method of some object."""
    is_bound = not isinstance(getattr(value, "__self__", None), ModuleType | type | None)
    return isinstance(value, _Native) and not is_bound


def _name(value: Any) -> str:
    return f"{getattr(value, '__module__', None)}.{value.__qualname__}"


def _wrapped(value: object) -> tuple[Any, ...] | None:
    """What is called by what binds or calls functions, and with what; None: it does not."""
    match value:
        case staticmethod() | classmethod():
            return (value.__func__,)
        case property():
            return value.fget, value.fset, value.fdel
        case functools.cached_property():
            return (value.func,)
        case functools.partial() | functools.partialmethod():
            return value.func, value.args, value.keywords
        case MethodType():
            return value.__func__, value.__self__
        case functools._lru_cache_wrapper():
            return (value.__wrapped__,)
        case contextlib._GeneratorContextManager():  # as a decorator it is made again at each call
            return value.func, value.args, value.kwds
    return None


def _content(cell: CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # nothing is in it yet
        return None


def _pickled(path: str, value: Any) -> Any:
    """What an object would be made of again: its class, arguments, state and items, or its name."""
    reduce = copyreg.dispatch_table.get(type(value))
    try:
        parts = value.__reduce_ex__(2) if reduce is None else reduce(value)
    except Exception as error:  # of whatever kind the class raises
        raise ValueError(f"{path}: got {type(value).__name__}; allowed: {_TOLD_OF_CODE}") from error
    if isinstance(parts, str):
        return f"{getattr(value, '__module__', None)}.{parts}"
    items = [list(each) for each in parts[3:5] if each is not None]
    return [*parts[:3], items]


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


def _of_code(code: CodeType) -> tuple[str, list[str]]:
    """A digest of what it does, and not of where it was written; and all names in it."""
    known = _known_code.get(id(code))
    if known is None or known[0] is not code:
        facts = (
            code.co_code,
            code.co_exceptiontable,
            code.co_flags,
            (code.co_argcount, code.co_posonlyargcount, code.co_kwonlyargcount),
            (code.co_names, code.co_varnames, code.co_freevars, code.co_cellvars),
            [_of_code(c)[0] if isinstance(c, CodeType) else _constant(c) for c in code.co_consts],
        )
        inner = (name for c in code.co_consts if isinstance(c, CodeType) for name in _of_code(c)[1])
        names = sorted({*code.co_names, *inner})
        known = _known_code[id(code)] = code, hashlib.sha256(repr(facts).encode()).hexdigest(), names
    return known[1:]


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
