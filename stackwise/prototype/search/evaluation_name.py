"""evaluation_name: by what a study tells an evaluation from others."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import inspect
import json
import sys
from pathlib import Path
from types import ModuleType
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
    """File and digest of the source of what a script or notebook defines; None: it is of another module.

    All scripts and notebooks are one module, `__main__`, and its names are those of each of them.

    Raises:
        ValueError: nothing keeps the source, as of what was typed at a prompt.
    """
    while isinstance(evaluate, functools.partial):
        evaluate = evaluate.func
    owner = _owner(evaluate)
    kind = _kind(evaluate if owner is None else owner)
    if kind.__module__ != _SCRIPT:
        return None
    try:
        source = inspect.getsource(kind)
    except (OSError, TypeError):
        allowed = f"a name of the study, since the source of evaluate={evaluate!r} is kept nowhere"
        raise ValueError(f"name: got None; allowed: {allowed}") from None
    file = Path(getattr(sys.modules[_SCRIPT], "__file__", None) or "notebook").name
    return f"{file}:{hashlib.sha256(source.encode()).hexdigest()[:16]}"


def _kind(evaluate: Any) -> Any:
    return evaluate if hasattr(evaluate, "__qualname__") else type(evaluate)


def _owner(evaluate: Any) -> Any:
    """The object that a method is of; None: it is no method of an object."""
    owner = getattr(evaluate, "__self__", None)
    return None if isinstance(owner, type | ModuleType) else owner


def _called(name: str | None, values: Any) -> str | None:
    try:
        return None if name is None else f"{name}({json.dumps(values, sort_keys=True)})"
    except (TypeError, ValueError):
        return None
