"""Repeated layers of a model, and the residual stream between them, found by a call.

Shapes: B batch, T positions, C width.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from stackwise.checks.probe.batch import tensors_in
from stackwise.checks.probe.recorded_calls import watched_modules

__all__ = ["Stream", "pattern", "repeated_layers", "residual_stream"]


@dataclass(frozen=True)
class Stream:
    """Residual stream of a call.

    Attributes:
        layers: names of the layers, in the order of their calls.
        first: stream (B, T, C) before the first layer.
        after: stream (B, T, C) after each layer, with its graph if gradients are on.
    """

    layers: list[str]
    first: Tensor
    after: list[Tensor]


def pattern(name: str) -> str:
    """Return a module's or parameter's name with "*" in place of every index. Siblings share it."""
    return re.sub(r"(?<![^.])\d+(?![^.])", "*", name)


def repeated_layers(model: nn.Module) -> list[list[str]]:
    """Return groups of modules of one type whose names differ only in an index, the best candidates first.

    A group must hold at least half as many parameters as the largest one. Groups with more members are first,
    so that blocks precede stacks of blocks, and layers precede their parts.
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
    """Activations of one call of a model: the first floating-point tensor (B, T, C) of each input and output.

    Attributes:
        calls: name and input of each module, in the order of the calls.
        outputs: module -> output of its last call.
        sources: id of a tensor -> the innermost module that created it, the input of that module, and the
            tensor, so that no id is reused.
    """

    calls: list[tuple[str, Tensor | None]] = field(default_factory=list)
    outputs: dict[str, Tensor | None] = field(default_factory=dict)
    sources: dict[int, tuple[str, Tensor | None, Tensor]] = field(default_factory=dict)


def residual_stream(model: nn.Module, run: Callable[[], object]) -> Stream | None:
    """Return the residual stream while `run` calls the model, or None if there are no repeated layers.

    The stream before a layer is the input of its first module that is called, because the layer itself need
    not be called. The stream at the end is the output of the last layer, or the input of the next module.
    An input that only a branch reads, such as the output of a norm, is not the stream.
    """
    trace = _traced(model, run)
    streams = (_stream_through(names, trace) for names in repeated_layers(model))
    return next((stream for stream in streams if stream is not None), None)


def _traced(model: nn.Module, run: Callable[[], object]) -> _Trace:
    trace = _Trace()
    inputs: list[Tensor | None] = []

    def before(name: str, arguments: tuple[Any, ...]) -> None:
        inputs.append(_activation(arguments))
        trace.calls.append((name, inputs[-1]))

    def after(name: str, output: Any) -> None:
        source = inputs.pop()
        trace.outputs[name] = _activation(output)
        for tensor in tensors_in(output):
            # A module that returns its input, such as dropout in eval mode, is not its source.
            if tensor is not source:
                trace.sources.setdefault(id(tensor), (name, source, tensor))

    with watched_modules(model, before, after):
        run()
    return trace


def _stream_through(names: list[str], trace: _Trace) -> Stream | None:
    """Return the stream through the layers `names`, or None if they do not run one after the other."""
    entries: list[tuple[int, str, Tensor]] = []
    last = -1
    for name in names:
        calls = [(i, tensor) for i, (called, tensor) in enumerate(trace.calls) if _is_in(called, name)]
        first = next(((i, name, tensor) for i, tensor in calls if tensor is not None), None)
        if first is None:
            return None
        entries.append(first)
        last = max(last, calls[-1][0])
    entries.sort(key=lambda entry: entry[0])
    final = trace.outputs.get(entries[-1][1])
    if final is None:
        final = next((tensor for _, tensor in trace.calls[last + 1 :] if tensor is not None), None)
    after = [tensor for _, _, tensor in entries[1:]] + ([] if final is None else [final])
    if not _is_chain(entries, trace) or any(tensor.shape != entries[0][2].shape for tensor in after):
        return None
    return Stream([name for _, name, _ in entries][: len(after)], entries[0][2], after)


def _is_chain(entries: list[tuple[int, str, Tensor]], trace: _Trace) -> bool:
    """Return True if each layer continues the stream of the previous one. Parallel layers do not."""
    is_serial = len({id(tensor) for _, _, tensor in entries}) == len(entries)
    links = ((name, start, end) for (_, name, start), (_, _, end) in pairwise(entries))
    return is_serial and all(_continues(*link, trace) for link in links)


def _continues(name: str, before: Tensor, after: Tensor, trace: _Trace) -> bool:
    """Return True if `after` is the stream after a layer with input `before`, not an input of a branch."""
    source: Tensor | None = after
    while source is not None and (found := trace.sources.get(id(source))) is not None:
        if _is_in(found[0], name):
            return True
        source = found[1]
    if source is not after:
        return False  # a function of something other than the previous layer
    branch = trace.outputs.get(name)
    if branch is None:
        return True  # the layer is not called, and its caller computes the sum
    if branch.shape != after.shape or before.shape != after.shape:
        return False
    # The caller may add, scale or copy. A norm does not fit, because it scales each position differently.
    parts = torch.stack((before, branch), dim=-1).detach().flatten(0, -2).double().cpu()
    wanted = after.detach().flatten().double().cpu()
    if not (parts.isfinite().all() and wanted.isfinite().all()):
        return True  # the check reports it
    fitted = parts @ torch.linalg.lstsq(parts, wanted, driver="gelsd").solution
    return bool((fitted - wanted).norm() <= 1e-3 * wanted.norm())


def _is_in(name: str, layer: str) -> bool:
    return name == layer or name.startswith(layer + ".")


def _activation(values: Any) -> Tensor | None:
    """Return the first floating-point tensor of three dimensions."""
    return next((t for t in tensors_in(values) if t.is_floating_point() and t.ndim == 3), None)
