"""The optimizer: AdamW over two parameter groups, with and without weight decay."""

from __future__ import annotations

from typing import Any, Protocol, cast

import torch
from torch import Tensor, nn

from stackwise.config import OptimizerConfig
from stackwise.training.master import MasterAdamW

__all__ = ["FusedOptimizer", "clip_divisor", "create_optimizer", "parameter_groups"]


def parameter_groups(model: nn.Module, weight_decay: float) -> list[dict[str, object]]:
    """Trainable parameters, each exactly once: matrices decay; norms, biases and embeddings do not.

    A head tied to the embedding is an embedding.
    """
    embeddings = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding)}
    trainable = [p for p in model.parameters() if p.requires_grad]
    decayed = [p for p in trainable if p.ndim >= 2 and id(p) not in embeddings]
    kept = [p for p in trainable if p.ndim < 2 or id(p) in embeddings]
    return [{"params": decayed, "weight_decay": weight_decay}, {"params": kept, "weight_decay": 0.0}]


class FusedOptimizer(Protocol):
    """An optimizer that scales gradients, and leaves a step out, in the pass that updates the weights.

    Attributes:
        param_groups: as of every optimizer.
        found_inf: where it is not zero, a step changes nothing; None: zero.
        grad_scale: what gradients are divided by; None: 1.
    """

    param_groups: list[dict[str, Any]]
    found_inf: Tensor | None
    grad_scale: Tensor | None

    def step(self) -> None:
        """Update every parameter that has a gradient."""

    def zero_grad(self) -> None:
        """Forget the gradients."""


def create_optimizer(
    model: nn.Module,
    config: OptimizerConfig,
    *,
    masters: bool = False,
    compile: bool = False,  # noqa: A002  # the name in PyTorch
) -> FusedOptimizer:
    """Fused AdamW over the trainable parameters of `model`.

    Args:
        model: whose parameters.
        config: learning rate, weight decay, betas, eps.
        masters: make the parameters bfloat16 and keep float32 masters of them; see `MasterAdamW`.
        compile: compile the pass over the masters.

    Raises:
        ValueError: nothing to train.
    """
    groups = parameter_groups(model, config.weight_decay)
    if not any(group["params"] for group in groups):
        raise ValueError("model: every parameter is frozen; unfreeze a Stack to train it")
    beta1, beta2 = config.betas
    if masters:
        frozen = [p for p in model.parameters() if not p.requires_grad]
        return MasterAdamW(
            groups, frozen, lr=config.lr, betas=(beta1, beta2), eps=config.eps, compile=compile
        )
    optimizer = torch.optim.AdamW(groups, lr=config.lr, betas=(beta1, beta2), eps=config.eps, fused=True)
    optimizer.found_inf = optimizer.grad_scale = None  # type: ignore[attr-defined]
    return cast("FusedOptimizer", optimizer)


def clip_divisor(total_norm: Tensor, max_norm: float) -> Tensor:
    """What gradients are divided by so that their global norm is at most `max_norm`: at least 1.

    Args:
        total_norm: their global L2 norm, a scalar tensor.
        max_norm: the limit.
    """
    return ((total_norm + 1e-6) / max_norm).clamp(min=1.0)
