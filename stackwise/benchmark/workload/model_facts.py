"""What a model tells of the work that was timed: its kernels, its bytes, whether it still trains."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from stackwise.benchmark.flops.closed_form import Recompute
from stackwise.subject.call_form import unwrapped
from stackwise.support.optimizer_state import states_of

__all__ = ["execution", "held_bytes", "recomputed_by", "weight_notes"]


def execution(model: nn.Module) -> dict[str, str]:
    """What a model says of its last call: its own `execution()`, or the attention of a transformers model."""
    model = unwrapped(model)
    tell = getattr(model, "execution", None)
    if callable(tell):
        return dict(tell())
    attention = getattr(getattr(model, "config", None), "_attn_implementation", None)
    return {} if attention is None else {"attention": str(attention)}


def recomputed_by(model: nn.Module) -> Recompute | None:
    """What the backward pass of a model computes again: nothing, every layer, or what nobody tells.

    Models of transformers have a switch on each layer. Whoever replaces the `forward` of a module, as
    recomputation from outside does, may compute anything. A `forward` that calls checkpoint by itself is not
    seen from here.
    """
    modules = list(unwrapped(model).modules())
    layers = [module for module in modules if hasattr(type(module), "gradient_checkpointing")]
    switched = [bool(module.gradient_checkpointing) for module in layers]
    if any(switched):
        return "blocks" if all(switched) else None
    return None if any("forward" in vars(module) for module in modules) else "none"


def held_bytes(model: nn.Module, optimizer: torch.optim.Optimizer | None) -> int:
    """Return the size in bytes of weights and buffers; with an optimizer also of gradients and its state.

    A lower bound: the memory of a tensor subclass, such as a quantised weight, need not be what its shape and
    dtype say, and is not counted.
    """
    weights = list(model.parameters())
    held: list[Any] = [*weights, *model.buffers()]
    if optimizer is not None:
        held += [p for p in weights if p.requires_grad]  # of the size of its gradient
        states = [state for _, _, state in states_of(optimizer) if isinstance(state, Mapping)]
        held += [value for state in states for value in state.values()]
    return sum(each.nbytes for each in held if type(each) in (Tensor, nn.Parameter))


def weight_notes(model: nn.Module) -> tuple[str, ...]:
    """Whether a model that was trained still has weights to train."""
    broken = list(_not_finite(model))
    if not broken:
        return ()
    more = f" and {len(broken) - 1} more" if len(broken) > 1 else ""
    return (f"weights are not finite: {broken[0]}{more}; what was timed is no training",)


def _not_finite(model: nn.Module) -> Iterator[str]:
    """Names of floating-point parameters with an infinity or a NaN."""
    for name, parameter in model.named_parameters():
        if parameter.is_floating_point() and not bool(torch.isfinite(parameter.detach()).all()):
            yield name
