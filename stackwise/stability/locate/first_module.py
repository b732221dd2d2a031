"""First module: finds the module that turns finite inputs into a non-finite output, in a forward pass."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn

from stackwise.stability.locate.reading import tensors_in
from stackwise.support.hooks import temporary_hooks

__all__ = [
    "ROOT",
    "first_nan_module",
    "first_nonfinite_module",
    "shown_name",
    "uncompiled",
]


_COMPILED = "_orig_mod"
# Parts that torch's wrappers of one module add to its name.
_WRAPPED = (_COMPILED, "_checkpoint_wrapped_module", "_fsdp_wrapped_module")
ROOT = "(outside the submodules)"


def first_nonfinite_module(model: nn.Module, run: Callable[[], object]) -> str | None:
    """Run `run` under hooks and return the name of the module that first became non-finite.

    Args:
        model: model whose modules are observed.
        run: function that calls the model.

    Returns:
        The name of the first module, in order of completion, with healthy inputs and a bad output ("(outside
        the submodules)" for the root); None if there is none. NaN and +inf are bad. Additive masks contain
        -inf, so it is bad only if no other module is found.
    """
    found: list[str] = []
    with_negative: list[str] = []

    def seen(name: str, given: Any, output: Any) -> None:
        if _is_sound(given):
            if not _is_sound(output):
                found.append(name)
            elif not _is_sound(output, negative=True):
                with_negative.append(name)

    _run_watched(model, run, seen)
    return next(iter(found + with_negative), None)


def first_nan_module(model: nn.Module, run: Callable[[], object]) -> str | None:
    """Run `run` under hooks and return the first module, in order of completion, with a NaN in its output."""
    found: list[str] = []

    def seen(name: str, _given: Any, output: Any) -> None:
        if not found and any(t.is_floating_point() and bool(t.isnan().any()) for t in tensors_in(output)):
            found.append(name)

    _run_watched(model, run, seen)
    return next(iter(found), None)


def _run_watched(model: nn.Module, run: Callable[[], object], seen: Callable[[str, Any, Any], None]) -> None:
    """Run `run`, and call `seen` with the name, the arguments and the output of each module call."""

    def watch(name: str) -> Callable[[nn.Module, Any, Any, Any], None]:
        return lambda _module, args, kwargs, output: seen(name, (args, kwargs), output)

    handles = (
        module.register_forward_hook(watch(shown_name(name)), with_kwargs=True)
        for name, module in model.named_modules()
    )
    with temporary_hooks(handles), uncompiled(model):
        run()


def shown_name(name: str) -> str:
    """Return a module's name without the parts of compilers and wrappers; `ROOT` for the model."""
    return ".".join(part for part in name.split(".") if part not in _WRAPPED) or ROOT


def uncompiled(model: nn.Module) -> AbstractContextManager[Any]:
    """Run compiled modules eagerly in the block, because hooks that read values cannot be compiled."""
    for module in model.modules():
        if hasattr(module, _COMPILED) or getattr(module, "_compiled_call_impl", None) is not None:
            eager: AbstractContextManager[Any] = torch.compiler.set_stance("force_eager")
            return eager
    return nullcontext()


def _is_sound(value: Any, *, negative: bool = False) -> bool:
    """Return True if no tensor in `value` has a NaN, a +inf, or, if `negative`, a -inf."""
    floating = (t for t in tensors_in(value) if t.is_floating_point())
    return not any(bool((~t.isfinite() & ~(t.isneginf() & (not negative))).any()) for t in floating)
