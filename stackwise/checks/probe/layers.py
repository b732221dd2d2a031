"""Layers: the repeated layers of a model, found by running it, and the stream of activations between them.

Shapes: B batch, T positions, C width.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
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


@dataclass
class _Trace:
    """What one call of a model showed.

    Attributes:
        calls: name of each module and its first activation, in the order of the calls.
        outputs: module -> its first activation at its last call.
        sources: id of an activation -> the module that gave it last, and what that one was given.
    """

    calls: list[Call]
    outputs: dict[str, Tensor | None]
    sources: dict[int, tuple[str, Tensor | None]]


def residual_stream(model: nn.Module, run: Callable[[], object]) -> Stream | None:
    """The stream after each repeated layer, while `run` calls the model; None: there are no such layers.

    A layer need not be called itself: what enters the first module of it that is called is the stream
    before it. What enters the module after the last layer, or else the output of the last layer, is the
    stream at its end. What is read beside the stream alone, as the norm's output that enters a branch, is
    none of it.
    """
    trace = _Trace([], {}, {})
    entered: list[Tensor | None] = []

    def before(name: str) -> Callable[[nn.Module, Any, Any], None]:
        def note(_: nn.Module, args: Any, kwargs: Any) -> None:
            entered.append(_first((*args, *kwargs.values())))
            trace.calls.append((name, entered[-1]))

        return note

    def after(name: str) -> Callable[[nn.Module, Any, Any], None]:
        def note(_: nn.Module, _args: Any, output: Any) -> None:
            given = entered.pop()
            trace.outputs[name] = _first((output,))
            for tensor in tensors_in((output,)):
                # Dropout in eval mode hands on what it was given; the innermost module is the source.
                if tensor is not given:
                    trace.sources.setdefault(id(tensor), (name, given))
                    kept.append(tensor)

        return note

    kept: list[Tensor] = []  # so that no id is given twice
    handles = []
    for name, module in model.named_modules():
        handles.append(module.register_forward_pre_hook(before(name), with_kwargs=True))
        handles.append(module.register_forward_hook(after(name)))
    try:
        run()
    finally:
        for handle in handles:
            handle.remove()
    for names in repeated_layers(model):
        found = _follow(names, trace)
        if found is not None:
            return found
    return None


def _follow(names: list[str], trace: _Trace) -> Stream | None:
    """The stream through the layers `names`; None where they are not run one after the other."""
    entries: list[tuple[int, str, Tensor]] = []
    last = -1
    for name in names:
        inside = [i for i, (called, _) in enumerate(trace.calls) if _is_in(called, name)]
        first = next((i for i in inside if trace.calls[i][1] is not None), None)
        if first is None:
            return None
        tensor = trace.calls[first][1]
        assert tensor is not None
        entries.append((first, name, tensor))
        last = max(last, inside[-1])
    entries.sort(key=lambda entry: entry[0])
    final = trace.outputs.get(entries[-1][1])
    if final is None:
        final = next((tensor for _, tensor in trace.calls[last + 1 :] if tensor is not None), None)
    after = [tensor for _, _, tensor in entries[1:]] + ([] if final is None else [final])
    if any(tensor.shape != entries[0][2].shape for tensor in after):
        return None
    if len({id(tensor) for _, _, tensor in entries}) < len(entries):
        return None  # side by side
    if not all(_continues(one, other, trace) for one, other in pairwise(entries)):
        return None
    return Stream([name for _, name, _ in entries][: len(after)], after)


def _continues(one: tuple[int, str, Tensor], other: tuple[int, str, Tensor], trace: _Trace) -> bool:
    """Whether what enters the second layer is the stream, and no function of it that a branch alone reads."""
    (_, name, before), (_, _, after) = one, other
    source: Tensor | None = after
    while source is not None and (found := trace.sources.get(id(source))) is not None:
        if _is_in(found[0], name):
            return True
        source = found[1]
    if source is not after:
        return False  # of something else than the layer before it
    branch = trace.outputs.get(name)
    if branch is None:
        return True  # it is no layer that is called, and the sum is made by its caller
    if branch.shape != after.shape:
        return False
    # Its caller may add, scale or copy; a norm, whose scale is another one at each position, does not fit.
    parts = torch.stack((before, branch), dim=-1).detach().flatten(0, -2).double().cpu()
    wanted = after.detach().flatten().double().cpu()
    if not (parts.isfinite().all() and wanted.isfinite().all()):
        return True  # which is for the check to say
    fitted = parts @ torch.linalg.lstsq(parts, wanted, driver="gelsd").solution
    return bool((fitted - wanted).norm() <= 1e-3 * wanted.norm())


def _is_in(name: str, layer: str) -> bool:
    return name == layer or name.startswith(layer + ".")


def _first(values: Any) -> Tensor | None:
    """The first activation: a floating-point tensor of three dimensions."""
    return next((t for t in tensors_in(values) if t.is_floating_point() and t.ndim == 3), None)
