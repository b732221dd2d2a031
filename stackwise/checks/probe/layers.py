"""Layers: the repeated layers of a model, found by running it, and the stream of activations between them.

Shapes: B batch, T positions, C width.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from stackwise.checks.probe.batch import tensors_in

__all__ = ["Stream", "pattern", "repeated_layers", "residual_stream"]

Call = tuple[str, Tensor | None]


@dataclass(frozen=True)
class Stream:
    """What flows between layers.

    Attributes:
        layers: names of the layers, in the order in which they ran.
        after: the stream after each of them (B, T, C), part of the graph where gradients are on.
    """

    layers: list[str]
    after: list[Tensor]


def pattern(name: str) -> str:
    """A module's or parameter's name with every index replaced by "*": what siblings share."""
    return re.sub(r"(?<![^.])\d+(?![^.])", "*", name)


def repeated_layers(model: nn.Module) -> list[list[str]]:
    """Groups of modules of one type whose names differ in an index alone, the best candidates first.

    Only groups that hold at least half as many parameters as the largest one; those with the most
    members first, so that blocks come before the stacks that they form, and layers before their parts.
    """
    groups: dict[tuple[str, type], list[str]] = defaultdict(list)
    for name, module in model.named_modules():
        if name.rpartition(".")[2].isdigit():
            groups[pattern(name), type(module)].append(name)
    sizes = {}
    for key, names in groups.items():
        if len(names) > 1:
            sizes[key] = sum(p.numel() for n in names for p in model.get_submodule(n).parameters())
    most = max(sizes.values(), default=0)
    return [
        groups[key]
        for key in sorted(sizes, key=lambda k: (-len(groups[k]), len(k[0])))
        if sizes[key] and 2 * sizes[key] >= most
    ]


def residual_stream(model: nn.Module, run: Callable[[], object]) -> Stream | None:
    """The stream after each repeated layer, while `run` calls the model; None: there are no such layers.

    A layer need not be called itself: what enters the first module of it that is called is the stream
    before it. What enters the module after the last layer, or else the output of the last layer, is the
    stream at its end.
    """
    calls: list[Call] = []
    outputs: dict[str, Tensor | None] = {}

    def before(name: str) -> Callable[[nn.Module, Any, Any], None]:
        return lambda _, args, kwargs: calls.append((name, _first((*args, *kwargs.values()))))

    def after(name: str) -> Callable[[nn.Module, Any, Any], None]:
        return lambda _module, _args, output: outputs.__setitem__(name, _first((output,)))

    handles = []
    for name, module in model.named_modules():
        handles.append(module.register_forward_pre_hook(before(name), with_kwargs=True))
        if name.rpartition(".")[2].isdigit():
            handles.append(module.register_forward_hook(after(name)))
    try:
        run()
    finally:
        for handle in handles:
            handle.remove()
    for names in repeated_layers(model):
        found = _follow(names, calls, outputs)
        if found is not None:
            return found
    return None


def _follow(names: list[str], calls: list[Call], outputs: dict[str, Tensor | None]) -> Stream | None:
    """The stream through the layers `names`; None where they are not run one after the other."""
    entries: list[tuple[int, str, Tensor]] = []
    last = -1
    for name in names:
        inside = [i for i, (called, _) in enumerate(calls) if called == name or called.startswith(name + ".")]
        first = next((i for i in inside if calls[i][1] is not None), None)
        if first is None:
            return None
        tensor = calls[first][1]
        assert tensor is not None
        entries.append((first, name, tensor))
        last = max(last, inside[-1])
    entries.sort(key=lambda entry: entry[0])
    final = outputs.get(entries[-1][1])
    if final is None:
        final = next((tensor for _, tensor in calls[last + 1 :] if tensor is not None), None)
    after = [tensor for _, _, tensor in entries[1:]] + ([] if final is None else [final])
    if any(tensor.shape != entries[0][2].shape for tensor in after):
        return None
    if len({id(tensor) for _, _, tensor in entries}) < len(entries):
        return None  # side by side
    return Stream([name for _, name, _ in entries][: len(after)], after)


def _first(values: Any) -> Tensor | None:
    """The first activation: a floating-point tensor of three dimensions."""
    return next((t for t in tensors_in(values) if t.is_floating_point() and t.ndim == 3), None)
