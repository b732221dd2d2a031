"""Recorded calls: the arguments and outputs of modules in a call of a model."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import nn

from stackwise.support.hooks import temporary_hooks

__all__ = ["RecordedCall", "recorded_calls", "watched_modules"]


@dataclass(frozen=True)
class RecordedCall:
    """Call of a module.

    Attributes:
        name: name of the module.
        module: the module.
        args: its positional arguments.
        named: its keyword arguments.
        output: its output.
    """

    name: str
    module: nn.Module
    args: tuple[Any, ...]
    named: dict[str, Any]
    output: Any


def recorded_calls(
    model: nn.Module, run: Callable[[], object], is_recorded: Callable[[str, nn.Module], bool]
) -> list[RecordedCall]:
    """Return the calls of modules in the order in which they end.

    Args:
        model: the model.
        run: calls the model.
        is_recorded: returns True for the name of a module, and the module, whose calls are recorded.
    """
    calls: list[RecordedCall] = []

    def record(name: str, module: nn.Module, args: Any, named: Any, output: Any) -> None:
        calls.append(RecordedCall(name, module, args, named, output))

    handles = (
        module.register_forward_hook(partial(record, name), with_kwargs=True)
        for name, module in model.named_modules()
        if is_recorded(name, module)
    )
    with temporary_hooks(handles):
        run()
    return calls


@contextmanager
def watched_modules(
    model: nn.Module, before: Callable[[str, tuple[Any, ...]], None], after: Callable[[str, Any], None]
) -> Iterator[None]:
    """Call functions before and after each call of a module inside the block.

    Args:
        model: the model.
        before: function of the name of the module, and its positional and keyword arguments.
        after: function of the name of the module, and its output.
    """

    def enter(name: str, _: nn.Module, args: Any, kwargs: Any) -> None:
        before(name, (*args, *kwargs.values()))

    def leave(name: str, _: nn.Module, __: Any, output: Any) -> None:
        after(name, output)

    handles = []
    for name, module in model.named_modules():
        handles.append(module.register_forward_pre_hook(partial(enter, name), with_kwargs=True))
        handles.append(module.register_forward_hook(partial(leave, name)))
    with temporary_hooks(handles):
        yield
