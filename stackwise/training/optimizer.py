"""The optimizer: AdamW over two parameter groups, with and without weight decay."""

from __future__ import annotations

import torch
from torch import nn

from stackwise.config import OptimizerConfig

__all__ = ["clip_gradients", "create_optimizer", "parameter_groups"]


def parameter_groups(model: nn.Module, weight_decay: float) -> list[dict[str, object]]:
    """Trainable parameters, each exactly once: matrices decay; norms, biases and embeddings do not.

    A head tied to the embedding is an embedding.
    """
    embeddings = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding)}
    trainable = [p for p in model.parameters() if p.requires_grad]
    decayed = [p for p in trainable if p.ndim >= 2 and id(p) not in embeddings]
    kept = [p for p in trainable if p.ndim < 2 or id(p) in embeddings]
    return [{"params": decayed, "weight_decay": weight_decay}, {"params": kept, "weight_decay": 0.0}]


def create_optimizer(model: nn.Module, config: OptimizerConfig) -> torch.optim.AdamW:
    """Fused AdamW over the trainable parameters of `model`.

    Raises:
        ValueError: nothing to train.
    """
    groups = parameter_groups(model, config.weight_decay)
    if not any(group["params"] for group in groups):
        raise ValueError("model: every parameter is frozen; unfreeze a Stack to train it")
    beta1, beta2 = config.betas
    return torch.optim.AdamW(groups, lr=config.lr, betas=(beta1, beta2), eps=config.eps, fused=True)


@torch.no_grad()
def clip_gradients(gradients: list[torch.Tensor], total_norm: torch.Tensor, max_norm: float) -> None:
    """Scale `gradients` in place to a global norm of at most `max_norm`, without a host sync.

    Args:
        gradients: any shapes, one device.
        total_norm: their global L2 norm, a scalar tensor.
        max_norm: the limit.
    """
    scale = (max_norm / (total_norm + 1e-6)).clamp(max=1.0)
    torch._foreach_mul_(gradients, scale)
