"""Name of an evaluation, by which a study distinguishes it from other evaluations."""

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
    """Return a name that identifies an evaluation in every process. None: it cannot be identified."""
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
    # Several lambdas share one name, and closures of one name differ in their captured values.
    unnamed = getattr(evaluate, "__closure__", None) or getattr(evaluate, "__name__", "") == "<lambda>"
    if unnamed or not hasattr(evaluate, "__qualname__"):
        return None
    return kind_name(evaluate)


def kind_name(evaluate: Any) -> str:
    """Return the module and name of a function or class, or of an object's class."""
    kind = _kind(evaluate)
    return f"{kind.__module__}:{kind.__qualname__}"


def evaluation_code(evaluate: Any) -> str | None:
    """Return the file and a digest of the code of an object from a script or notebook.

    All scripts and notebooks are the module `__main__`, so their names are not unique. The digest uses the
    compiled code, because the file may have been edited after it was read. Each version of Python compiles to
    different code. None: the object is from another module.
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
    """Return the object of a bound method. None: not a method of an object."""
    owner = getattr(evaluate, "__self__", None)
    return None if isinstance(owner, type | ModuleType) else owner


def _members(kind: type) -> str:
    """Return the members that a class defines: functions and values, without Python's own attributes."""
    own = {
        name: _code(value)
        for name, value in vars(kind).items()
        if isinstance(value, FunctionType) or not name.startswith("__")
    }
    return repr(sorted(own.items()))


def _code(value: Any) -> str:
    """Return compiled code or a constant as text without addresses and lines, equal in every process."""
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
    if isinstance(value, frozenset):  # its order differs between processes
        return repr(sorted(_code(each) for each in value))
    constant = value is None or isinstance(value, str | bytes | int | float | complex | EllipsisType)
    return repr(value) if constant else type(value).__qualname__


def _called(name: str | None, values: Any) -> str | None:
    try:
        return None if name is None else f"{name}({json.dumps(values, sort_keys=True)})"
    except (TypeError, ValueError):
        return None
