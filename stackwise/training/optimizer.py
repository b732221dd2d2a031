"""The optimizer: AdamW over parameter groups with and without weight decay, at one or more learning rates."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol, cast

import torch
from torch import Tensor, nn

from stackwise.config import OptimizerConfig
from stackwise.model.initialization import learning_rate_multipliers
from stackwise.model.rack import Rack
from stackwise.training.master import MasterAdamW

__all__ = ["FusedOptimizer", "clip_divisor", "create_optimizer", "parameter_groups"]


def parameter_groups(
    model: nn.Module, weight_decay: float, multipliers: Mapping[str, float] | None = None
) -> list[dict[str, Any]]:
    """Trainable parameters, each exactly once: matrices decay; norms, biases and embeddings do not.

    A head tied to the embedding is an embedding.

    Args:
        model: anything with parameters.
        weight_decay: of what decays. It is divided by the multiplier, since AdamW multiplies it by the
            learning rate.
        multipliers: of the learning rate, by name of the parameter; one that is not named has 1.

    Returns:
        two groups for each multiplier, `lr_multiplier`: what decays, what does not.
    """
    embeddings = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding)}
    by_multiplier: dict[float, list[nn.Parameter]] = {1.0: []}
    for name, p in model.named_parameters():
        if p.requires_grad:
            by_multiplier.setdefault((multipliers or {}).get(name, 1.0), []).append(p)
    groups = []
    for multiplier, trainable in by_multiplier.items():
        decayed = [p for p in trainable if p.ndim >= 2 and id(p) not in embeddings]
        kept = [p for p in trainable if p.ndim < 2 or id(p) in embeddings]
        groups += [
            {"params": decayed, "weight_decay": weight_decay / multiplier, "lr_multiplier": multiplier},
            {"params": kept, "weight_decay": 0.0, "lr_multiplier": multiplier},
        ]
    return groups


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
    """Fused AdamW over the trainable parameters of `model`, those of a `mup` Rack at their multiplied rates.

    Args:
        model: whose parameters.
        config: learning rate, weight decay, betas, eps.
        masters: make the parameters bfloat16 and keep float32 masters of them; see `MasterAdamW`.
        compile: compile the pass over the masters.

    Raises:
        ValueError: nothing to train.
    """
    multipliers = None
    if isinstance(model, Rack) and model.mup_base_width is not None:
        multipliers = learning_rate_multipliers(model, model.mup_base_width)
    groups = parameter_groups(model, config.weight_decay, multipliers)
    for group in groups:
        group["lr"] = config.lr * group["lr_multiplier"]
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
