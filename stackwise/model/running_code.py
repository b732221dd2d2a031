"""Running code: what classes and functions consist of in memory, which their files may no longer say."""

from __future__ import annotations

import enum
import functools
import hashlib
import sys
from pathlib import Path
from types import CellType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import Tensor

__all__ = ["from_elsewhere", "is_from_elsewhere", "parts_of", "wrapped_parts"]

_KNOWN = {"torch", "stackwise", *sys.stdlib_module_names}
_MADE_WHILE_RUNNING = 1 << 9  # Py_TPFLAGS_HEAPTYPE
_PLAIN = bool | int | float | complex | str | bytes | enum.Enum | torch.dtype | torch.device | Tensor | None


@functools.lru_cache(2**10)
def from_elsewhere(kind: type) -> list[type]:
    """A class and its bases, but those of this package, of torch and of Python."""
    return [each for each in kind.__mro__ if not _is_known_class(each)]


def is_from_elsewhere(code: type | FunctionType) -> bool:
    """Whether not all of it is of this package, of torch or of Python."""
    if isinstance(code, type):
        return bool(from_elsewhere(code))
    # A wrapper says that it is of the module of what it wraps; its globals are where it was written.
    return not (_is_known(code.__module__) and _is_known(code.__globals__.get("__name__")))


def parts_of(code: type | FunctionType, *, settings: bool) -> list[Any]:
    """What a class and its bases from elsewhere have, or what a function computes with.

    Of a class these are the names of all bases, files, and functions with their like. A file is as it is now,
    or None: it has what no function names. Where it was edited since it was imported, the functions differ
    from those of a process that imports it later. Of a function they are instructions, defaults, closure,
    and the globals that it names, where modules, and classes and functions of other modules, are names.

    Args:
        code: the class or function.
        settings: also with the attributes of classes that are no code.
    """
    return _class_parts(code, settings) if isinstance(code, type) else _function_parts(code)


def _class_parts(kind: type, settings: bool) -> list[Any]:
    parts: list[Any] = [[f"{each.__module__}.{each.__qualname__}" for each in kind.__mro__]]
    for each in from_elsewhere(kind):
        own = vars(each).items()
        bound = [(name, value) for name, value in own if _binds(value)]
        others = [(name, value) for name, value in own if not (_binds(value) or name.startswith("__"))]
        held = [(name, _visible(value, None)) for name, value in others if settings]
        parts.append((_file_digest(each), bound, held))
    return parts


def _function_parts(function: FunctionType) -> list[Any]:
    own = function.__globals__
    named = [(name, own[name]) for name in _names(function.__code__) if name in own]
    return [
        _instructions(function.__code__),
        function.__defaults__,
        function.__kwdefaults__,
        [_content(cell) for cell in function.__closure__ or ()],
        [(name, _visible(value, own.get("__name__"))) for name, value in named],
    ]


def wrapped_parts(value: Any) -> Any:
    """What something that binds or calls functions has of them; None: nothing that is known."""
    match value:
        case staticmethod() | classmethod():
            return value.__func__
        case property():
            return value.fget, value.fset, value.fdel
        case functools.cached_property():
            return value.func
        case functools.partial() | functools.partialmethod():
            return value.func, value.args, value.keywords
        case MethodType():
            return value.__func__, value.__self__
    return getattr(value, "__dict__", {}).get("__wrapped__")


def _is_known(module: str | None) -> bool:
    return module is not None and module.partition(".")[0] in _KNOWN


def _is_known_class(kind: type) -> bool:
    # What is executed without a `__name__` says that it is of builtins.
    executed = kind.__module__ == "builtins" and kind.__flags__ & _MADE_WHILE_RUNNING
    return _is_known(kind.__module__) and not executed


def _file_digest(kind: type) -> str | None:
    file = getattr(sys.modules.get(kind.__module__), "__file__", None)
    if file is None:
        return None
    try:
        return hashlib.sha256(Path(file).read_bytes()).hexdigest()
    except OSError:  # it went away since, or lies in an archive
        return None


def _instructions(code: CodeType) -> str:
    """A digest of all of it but its place in a file. Not cached: code may be equal and catch other errors."""
    facts = (
        code.co_code,
        code.co_exceptiontable,
        code.co_flags,
        (code.co_argcount, code.co_posonlyargcount, code.co_kwonlyargcount),
        (code.co_names, code.co_varnames, code.co_freevars, code.co_cellvars),
        [_constant(each) for each in code.co_consts],
    )
    return hashlib.sha256(repr(facts).encode()).hexdigest()


def _constant(value: Any) -> Any:
    match value:
        case CodeType():
            return _instructions(value)
        case tuple():
            return [_constant(each) for each in value]
        case frozenset():  # whose order is another one in each process
            return sorted(map(repr, value))
    return repr(value)


@functools.lru_cache(2**12)
def _names(code: CodeType) -> list[str]:
    nested = [name for each in code.co_consts if isinstance(each, CodeType) for name in _names(each)]
    return sorted({*code.co_names, *nested})


def _content(cell: CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # nothing is in it yet
        return None


def _binds(value: Any) -> bool:
    return hasattr(type(value), "__get__")


def _visible(value: Any, module: str | None) -> Any:
    """What code elsewhere holds, as far as it counts: plain values, what contains them, and code of `module`.

    An object counts by its class, other code and modules by name. None: code of any module.
    """
    seen = functools.partial(_visible, module=module)
    if isinstance(value, _PLAIN):
        return value
    if isinstance(value, type | FunctionType):
        return value if module in (None, value.__module__) else f"{value.__module__}.{value.__qualname__}"
    if isinstance(value, ModuleType):
        return value.__name__
    # No subclasses, which may make what they are asked for.
    if type(value) is dict:
        return [(seen(key), seen(value[key])) for key in sorted(value, key=repr)]
    if type(value) in (set, frozenset):
        return [seen(each) for each in sorted(value, key=repr)]
    if type(value) in (list, tuple):
        return [seen(each) for each in value]
    return seen(type(value)) if wrapped_parts(value) is None else value
