"""Compiled specs: the calls of a spec, compiled independently of other compilations."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from types import FunctionType
from typing import Any

import torch

from stackwise.subject.spec import ModelSpec

__all__ = ["COMPILE_MODES", "compile_now", "compiled_spec"]

COMPILE_MODES = ("default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs")


def compiled_spec(spec: ModelSpec, compile: bool | str) -> ModelSpec:  # noqa: A002
    """Return the spec with compiled calls if `compile` is set."""
    if not compile:
        return spec
    mode = None if compile is True else str(compile)

    def own(function: Callable[..., Any] | None) -> Callable[..., Any] | None:
        return None if function is None else _compiled(function, mode)

    return replace(spec, forward=_compiled(spec.forward, mode), decode=own(spec.decode), loss=own(spec.loss))


def compile_now(call: Callable[[], object]) -> str:
    """Make the call that compiles, and return the number of graphs.

    The compiler may be off without a message.
    """
    from torch._dynamo.utils import counters

    before = counters["stats"]["unique_graphs"]
    call()
    count = counters["stats"]["unique_graphs"] - before
    return f"{count} graph{'' if count == 1 else 's'}" if count else "asked for, but no graph was captured"


def _compiled(function: Callable[..., Any], mode: str | None) -> Callable[..., Any]:
    """Return `function` compiled for fixed shapes, independent of other compilations of it.

    The compiler stores a limited number of graphs per code object and runs further ones uncompiled, without a
    message. Each workload therefore has its own code object.
    """

    def call(*arguments: Any) -> Any:
        return function(*arguments)

    own = FunctionType(call.__code__.replace(), call.__globals__, call.__name__, None, call.__closure__)
    compiled: Callable[..., Any] = torch.compile(own, dynamic=False, mode=mode)
    return compiled
