"""Recorded calls: the arguments and outputs of modules in a call of a model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import nn

from stackwise.support.hooks import temporary_hooks

__all__ = ["RecordedCall", "recorded_calls"]


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

    def record(name: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any, named: Any, output: Any) -> None:
            calls.append(RecordedCall(name, module, args, named, output))

        return hook

    handles = (
        module.register_forward_hook(record(name), with_kwargs=True)
        for name, module in model.named_modules()
        if is_recorded(name, module)
    )
    with temporary_hooks(handles):
        run()
    return calls
