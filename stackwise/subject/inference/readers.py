"""Readers: kind of each argument of `forward`, from the first operation with weights that reads it.

Shapes: B batch, T positions.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from stackwise.subject.argument import CONTEXT, Argument, Read, known_kinds
from stackwise.subject.call_form import attempt, required_names

__all__ = ["arguments_read", "keys_read"]


def keys_read(model: nn.Module) -> list[str]:
    """Return the keys that a model reads from a dict, if this is its only argument."""

    class Batch(dict[str, Tensor]):
        def __missing__(self, key: Any) -> Tensor:
            if not isinstance(key, str):  # the argument is indexed like a tensor
                raise KeyError(key)
            self[key] = Argument(key, "context ids", 1).value(model, rows)
            return self[key]

    rows, batch = torch.zeros(2, 1, device=_device(model)), Batch()
    if len(required_names(model)) == 1:
        for _ in range(3):  # each failure may show another key
            seen = len(batch)
            read = arguments_read(model, list(batch), in_batch=True)
            batch |= {name: _value(model, name, read.get(name)) for name in batch}
            attempt(lambda: model(batch))  # noqa: B023
            if len(batch) == seen:
                break
    return list(batch)


def arguments_read(
    model: nn.Module, names: Sequence[str], sizes: Sequence[tuple[int, int]] = ((32, 32),), *, in_batch: bool
) -> dict[str, Read]:
    """Return the kind of each argument that an operation with weights reads.

    The result of an operation on two arguments, such as their sum, is attributed to neither of them.

    Args:
        model: in eval mode.
        names: names of all arguments that the model needs.
        sizes: likely heights and widths of images.
        in_batch: the model takes one dict.
    """
    reads: dict[str, Read] = {}
    left = list(sizes)
    while left and len(reads) < len(names):  # a wrong kind or size stops a call early
        values = {name: _value(model, name, reads.get(name), left) for name in names}
        mode = _Readers(values, left)
        with mode:
            attempt(lambda: model(values) if in_batch else model(**values))  # noqa: B023
        if mode.reads.keys() <= reads.keys():
            left = left[1:] if any(each.kind == "images" for each in reads.values()) else []
        reads |= mode.reads
    return {name: replace(read, sizes=tuple(sizes) * bool(read.sizes)) for name, read in reads.items()}


def _device(model: nn.Module) -> torch.device:
    return next((p.device for p in model.parameters()), torch.device("cpu"))


def _value(
    model: nn.Module, name: str, read: Read | None, sizes: Sequence[tuple[int, int]] = ((32, 32),)
) -> Tensor:
    """Return an example with as many positions as a context, or an image of the first size."""
    inputs = torch.zeros(2, CONTEXT, dtype=torch.long, device=_device(model))
    kinds = known_kinds(name)
    if read is None and kinds and kinds[0] != "context":
        return Argument(name, kinds[0]).value(model, inputs)
    read = read or Read("ids", 1)
    if read.kind == "images":
        read = replace(read, sizes=tuple(sizes))
    return Argument.of_read(name, read).value(model, inputs)


class _Readers(TorchFunctionMode):
    """Mode that records the first operation with weights on each argument, or on results of it alone."""

    def __init__(self, values: Mapping[str, Tensor], sizes: Sequence[tuple[int, int]]) -> None:
        super().__init__()
        self.reads: dict[str, Read] = {}
        self._sizes = tuple(sizes)
        self._sources = {id(value): name for name, value in values.items()}
        self._alive: list[Tensor] = [*values.values()]  # so that no id is used twice

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Run an operation after recording who reads which argument."""
        named = dict(kwargs or {})
        for place, each in enumerate(args[:3]):
            name = self._sources.get(id(each))
            if name is not None and (read := self._read(func, place, args, named)) is not None:
                self.reads.setdefault(name, read)
        names = self._names((args, named))
        output = func(*args, **named)
        if len(names) == 1:
            for each in tree_leaves(output):
                if isinstance(each, Tensor):
                    self._sources[id(each)] = next(iter(names))
                    self._alive.append(each)
        return output

    def _names(self, values: Any) -> set[str]:
        leaves: Iterable[Any] = tree_leaves(values)
        return {self._sources[id(each)] for each in leaves if id(each) in self._sources}

    def _read(self, func: Any, place: int, args: tuple[Any, ...], named: Mapping[str, Any]) -> Read | None:
        """Return the kind that an operation needs at a place of its arguments."""
        operation, weight = getattr(func, "__name__", ""), args[1] if len(args) > 1 else named.get("weight")
        match operation, place:
            case "cross_entropy" | "nll_loss", 1:
                return Read("labels")
            case "multi_head_attention_forward", _:
                return Read("vectors", args[3])
            case "embedding", 0 if isinstance(weight, Tensor):
                return Read("ids", len(weight))
            case "linear", 0 if isinstance(weight, Tensor):
                return Read("vectors", weight.shape[1])
            case "conv2d", 0 if isinstance(weight, Tensor):
                channels = weight.shape[1] * (args[6] if len(args) > 6 else 1)
                return Read("images", channels, self._sizes)
            case "layer_norm" | "rms_norm", 0:
                return Read("vectors", args[1][-1])
            case "lstm" | "gru" | "rnn_tanh", 0:
                weights = next(each for each in args if isinstance(each, list))
                return Read("vectors", weights[0].shape[1])
            case "matmul" | "__matmul__", 0 if isinstance(weight, nn.Parameter) and weight.ndim > 1:
                return Read("vectors", weight.shape[-2])
            case "__getitem__", 1 if isinstance(args[0], nn.Parameter):
                return Read("ids", len(args[0]))
        return None
