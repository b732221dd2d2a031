"""Facts about a timed model: its kernels, its bytes, its recomputation and its weights after training."""

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
    """Return the model's description of its last call.

    It is the result of its method `execution()`, or the attention implementation of a transformers model.
    """
    model = unwrapped(model)
    tell = getattr(model, "execution", None)
    if callable(tell):
        return dict(tell())
    attention = getattr(getattr(model, "config", None), "_attn_implementation", None)
    return {} if attention is None else {"attention": str(attention)}


def recomputed_by(model: nn.Module) -> Recompute | None:
    """Return the layers that the backward pass recomputes: "none", "blocks" (every layer), or None (unknown).

    Models of transformers have a switch on each layer. If the `forward` of a module is replaced, as external
    recomputation does, anything may be recomputed. A `forward` that calls checkpoint itself is not detected.
    """
    modules = list(unwrapped(model).modules())
    layers = [module for module in modules if hasattr(type(module), "gradient_checkpointing")]
    switched = [bool(module.gradient_checkpointing) for module in layers]
    if any(switched):
        return "blocks" if all(switched) else None
    return None if any("forward" in vars(module) for module in modules) else "none"


def held_bytes(model: nn.Module, optimizer: torch.optim.Optimizer | None) -> int:
    """Return the size in bytes of weights and buffers. With an optimizer, add gradients and optimizer state.

    It is a lower bound: tensor subclasses, such as quantised weights, are not counted, because their memory
    may differ from their shape and dtype.
    """
    weights = list(model.parameters())
    held: list[Any] = [*weights, *model.buffers()]
    if optimizer is not None:
        held += [p for p in weights if p.requires_grad]  # same size as the gradient
        states = [state for _, _, state in states_of(optimizer) if isinstance(state, Mapping)]
        held += [value for state in states for value in state.values()]
    return sum(each.nbytes for each in held if type(each) in (Tensor, nn.Parameter))


def weight_notes(model: nn.Module) -> tuple[str, ...]:
    """Return a note if weights of a trained model are not finite."""
    broken = list(_not_finite(model))
    if not broken:
        return ()
    more = f" and {len(broken) - 1} more" if len(broken) > 1 else ""
    return (f"weights are not finite: {broken[0]}{more}; what was timed is no training",)


def _not_finite(model: nn.Module) -> Iterator[str]:
    """Yield the names of floating-point parameters with an infinity or a NaN."""
    for name, parameter in model.named_parameters():
        if parameter.is_floating_point() and not bool(torch.isfinite(parameter.detach()).all()):
            yield name
