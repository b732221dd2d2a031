"""evaluation_name: by what a study tells an evaluation from others."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import inspect
import json
import sys
from pathlib import Path
from types import CodeType, EllipsisType, FunctionType, ModuleType
from typing import Any

__all__ = ["evaluation_code", "evaluation_name", "kind_name"]

_SCRIPT = "__main__"


def evaluation_name(evaluate: Any) -> str | None:
    """All that tells an evaluation from others, the same in each process; None: it cannot be told."""
    if isinstance(evaluate, functools.partial):
        inner = evaluation_name(evaluate.func)
        return _called(inner, [evaluate.args, evaluate.keywords])
    if dataclasses.is_dataclass(evaluate) and not isinstance(evaluate, type):
        values = {each.name: getattr(evaluate, each.name) for each in dataclasses.fields(evaluate)}
        return _called(kind_name(evaluate), values)
    owner = _owner(evaluate)
    if owner is not None:
        inner = evaluation_name(owner)
        return None if inner is None else f"{inner}.{evaluate.__name__}"
    # One name has as many lambdas as lines, and a closure as many as values that it was made with.
    unnamed = getattr(evaluate, "__closure__", None) or getattr(evaluate, "__name__", "") == "<lambda>"
    if unnamed or not hasattr(evaluate, "__qualname__"):
        return None
    return kind_name(evaluate)


def kind_name(evaluate: Any) -> str:
    """Module and name of a function or class; of an object those of its class."""
    kind = _kind(evaluate)
    return f"{kind.__module__}:{kind.__qualname__}"


def evaluation_code(evaluate: Any) -> str | None:
    """File and digest of the code of what a script or notebook defines; None: it is of another module.

    All scripts and notebooks are one module, `__main__`, and its names are those of each of them. Digested is
    what was compiled, since a file may have been edited after it was read; each version of Python compiles
    to a code of its own.
    """
    while isinstance(evaluate, functools.partial):
        evaluate = evaluate.func
    owner = _owner(evaluate)
    kind = _kind(evaluate if owner is None else owner)
    if kind.__module__ != _SCRIPT:
        return None
    defined = inspect.unwrap(getattr(kind, "__func__", kind))
    if not isinstance(defined, FunctionType | type):
        defined = type(defined)
    code = _members(defined) if isinstance(defined, type) else _code(defined)
    file = Path(getattr(sys.modules[_SCRIPT], "__file__", None) or "notebook").name
    return f"{file}:{hashlib.sha256(code.encode()).hexdigest()[:16]}"


def _kind(evaluate: Any) -> Any:
    return evaluate if hasattr(evaluate, "__qualname__") else type(evaluate)


def _owner(evaluate: Any) -> Any:
    """The object that a method is of; None: it is no method of an object."""
    owner = getattr(evaluate, "__self__", None)
    return None if isinstance(owner, type | ModuleType) else owner


def _members(kind: type) -> str:
    """What a class defines: its functions, and its values but for those that Python keeps of any class."""
    own = {
        name: _code(value)
        for name, value in vars(kind).items()
        if isinstance(value, FunctionType) or not name.startswith("__")
    }
    return repr(sorted(own.items()))


def _code(value: Any) -> str:
    """What is compiled, or a constant, as text without addresses and lines: the same in each process."""
    if isinstance(value, FunctionType):
        keywords = tuple(sorted((value.__kwdefaults__ or {}).items()))
        decorated = getattr(value, "__wrapped__", None)
        return _code((value.__code__, value.__defaults__, keywords, decorated))
    if isinstance(value, CodeType):
        names = value.co_names, value.co_varnames, value.co_freevars, value.co_cellvars
        return _code((value.co_code, value.co_exceptiontable, *names, *value.co_consts))
    if isinstance(value, staticmethod | classmethod):
        return _code(value.__func__)
    if isinstance(value, property):
        return _code((value.fget, value.fset))
    if isinstance(value, tuple):
        return repr([_code(each) for each in value])
    if isinstance(value, frozenset):  # in an order of each process's own
        return repr(sorted(_code(each) for each in value))
    constant = value is None or isinstance(value, str | bytes | int | float | complex | EllipsisType)
    return repr(value) if constant else type(value).__qualname__


def _called(name: str | None, values: Any) -> str | None:
    try:
        return None if name is None else f"{name}({json.dumps(values, sort_keys=True)})"
    except (TypeError, ValueError):
        return None
