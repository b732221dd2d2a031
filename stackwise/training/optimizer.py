"""The optimizer: AdamW over parameter groups with and without weight decay, at one or more learning rates."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol, cast

import torch
from torch import Tensor, nn

from stackwise.argument import check_sizes, require
from stackwise.config import OptimizerConfig
from stackwise.model.initialization import learning_rate_multipliers
from stackwise.model.rack import Rack
from stackwise.training.master import MasterAdamW

__all__ = ["FusedOptimizer", "clip_divisor", "create_optimizer", "parameter_groups", "per_stack_groups"]


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


def per_stack_groups(
    rack: Rack, config: OptimizerConfig, overrides: Mapping[int, Mapping[str, float]]
) -> list[dict[str, Any]]:
    """`parameter_groups` in which some Stacks have a learning rate or weight decay of their own.

    Args:
        rack: whose trainable parameters; those of a `mup` Rack at their multiplied rates.
        config: for all that `overrides` does not say.
        overrides: by index of the Stack `{"lr": ..., "weight_decay": ...}`, both or either.

    Returns:
        the groups of all other parameters, and behind them those of each Stack named. `lr_multiplier` is of
        the learning rate of `config`, so that a schedule of it scales all.

    Raises:
        ValueError: an index that the Rack does not have, another key, or a value that `OptimizerConfig`
            refuses.
    """
    settings: dict[int | None, OptimizerConfig] = {None: config}
    for index, override in overrides.items():
        check_sizes(minimum=0, overrides=index)
        require(index < len(rack.stacks), "overrides", index, f"0 to {len(rack.stacks) - 1}")
        unknown = sorted(override.keys() - {"lr", "weight_decay"})
        require(not unknown, f"overrides[{index}]", unknown, "lr, weight_decay")
        settings[index] = OptimizerConfig.from_dict(
            {**config.to_dict(), **override}, source=f"overrides[{index}]"
        )
    stack_of = {id(p): index for index in overrides for p in rack.get_stack(index).parameters()}
    groups = []
    for stack, own in settings.items():
        for group in parameter_groups(rack, own.weight_decay, _multipliers(rack)):
            params = [p for p in group["params"] if stack_of.get(id(p)) == stack]
            if params or stack is None:
                lr = own.lr * group["lr_multiplier"]
                groups.append({**group, "params": params, "lr": lr, "lr_multiplier": lr / config.lr})
    return groups


def _multipliers(model: nn.Module) -> Mapping[str, float] | None:
    if isinstance(model, Rack) and model.mup_base_width is not None:
        return learning_rate_multipliers(model, model.mup_base_width)
    return None


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
    groups = parameter_groups(model, config.weight_decay, _multipliers(model))
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
