"""pi-zero-pytorch#9 (lucidrains/pi-zero-pytorch): the output of the feed-forward goes through its input norm.

After `actions_ff` the code calls `ff_ada_rmsnorm` again, where `ff_ada_layerscale` should scale the branch.
The branch is normalised instead of scaled down, and the layer scale gets no gradient.
"""

import torch
import torch.nn.functional as F
from torch import nn

from stackwise import ModelSpec

DIM_ACTION = 6


class AdaptiveRMSNorm(nn.Module):
    """Norm with a gain and a shift that depend on the time condition."""

    def __init__(self, dim: int, dim_cond: int) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(dim, elementwise_affine=False, eps=1e-6)
        self.to_gamma, self.to_beta = nn.Linear(dim_cond, dim), nn.Linear(dim_cond, dim, bias=False)

    def forward(self, actions: torch.Tensor, cond: torch.Tensor) -> torch.Tensor:
        """Normalise (batch, time, dim); `cond` is (batch, dim_cond)."""
        gamma, beta = self.to_gamma(cond).sigmoid()[:, None], self.to_beta(cond)[:, None]
        return self.norm(actions) * gamma + beta


class AdaptiveLayerscale(nn.Module):
    """Scale of a residual branch, small at first, that depends on the time condition."""

    def __init__(self, dim: int, dim_cond: int, adaln_zero_bias_init_value: float = -2.0) -> None:
        super().__init__()
        self.to_adaln_zero_gamma = nn.Linear(dim_cond, dim)
        nn.init.zeros_(self.to_adaln_zero_gamma.weight)
        nn.init.constant_(self.to_adaln_zero_gamma.bias, adaln_zero_bias_init_value)

    def forward(self, actions: torch.Tensor, cond: torch.Tensor) -> torch.Tensor:
        """Scale (batch, time, dim); `cond` is (batch, dim_cond)."""
        return actions * self.to_adaln_zero_gamma(cond).sigmoid()[:, None]


class ActionLayer(nn.Module):
    """Attention and feed-forward of the action tokens."""

    def __init__(self, dim: int, dim_cond: int, *, layerscale: bool) -> None:
        super().__init__()
        self.layerscale = layerscale
        self.attn_ada_rmsnorm = AdaptiveRMSNorm(dim, dim_cond)
        self.to_actions_qkv, self.to_actions_out = nn.Linear(dim, 3 * dim, bias=False), nn.Linear(dim, dim)
        self.attn_ada_layerscale = AdaptiveLayerscale(dim, dim_cond)
        self.ff_ada_rmsnorm = AdaptiveRMSNorm(dim, dim_cond)
        self.ff_in, self.ff_out = nn.Linear(dim, 4 * dim), nn.Linear(2 * dim, dim)
        self.ff_ada_layerscale = AdaptiveLayerscale(dim, dim_cond)

    def actions_ff(self, x: torch.Tensor) -> torch.Tensor:
        """Apply the gated feed-forward network."""
        x, gates = self.ff_in(x).chunk(2, dim=-1)
        return self.ff_out(x * F.gelu(gates))

    def forward(self, action_tokens: torch.Tensor, time_cond: torch.Tensor) -> torch.Tensor:
        """Apply the layer; `time_cond` is (batch, dim_cond)."""
        qkv = self.to_actions_qkv(self.attn_ada_rmsnorm(action_tokens, time_cond)).chunk(3, dim=-1)
        q, k, v = (y.unflatten(-1, (4, -1)).transpose(1, 2) for y in qkv)
        out = self.to_actions_out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        action_tokens = action_tokens + self.attn_ada_layerscale(out, time_cond)
        out = self.actions_ff(self.ff_ada_rmsnorm(action_tokens, time_cond))
        scale = self.ff_ada_layerscale if self.layerscale else self.ff_ada_rmsnorm
        return action_tokens + scale(out, time_cond)


class PiZero(nn.Module):
    """Flow of a chunk of actions, without the vision-language part."""

    def __init__(self, *, layerscale: bool, dim: int = 32, dim_time_cond: int = 32, length: int = 32) -> None:
        super().__init__()
        self.to_action_tokens = nn.Linear(DIM_ACTION, dim)
        self.positions = nn.Parameter(0.1 * torch.randn(length, dim))
        self.register_buffer("time_weights", torch.randn(dim_time_cond // 2))
        self.to_time_cond = nn.Sequential(nn.Linear(dim_time_cond, dim_time_cond), nn.SiLU())
        self.layers = nn.ModuleList(ActionLayer(dim, dim_time_cond, layerscale=layerscale) for _ in range(2))
        self.final_actions_norm = nn.RMSNorm(dim)
        self.actions_to_pred_flow = nn.Linear(dim, DIM_ACTION, bias=False)

    def forward(self, actions: torch.Tensor, times: torch.Tensor) -> torch.Tensor:
        """Return the flow (batch, length, dim_action) of noised actions; `times` (batch,) is in [0, 1]."""
        angles = 2 * torch.pi * times[:, None] * self.time_weights
        time_cond = self.to_time_cond(torch.cat([angles.sin(), angles.cos()], dim=-1))
        tokens = self.to_action_tokens(actions) + self.positions[: actions.shape[1]]
        for layer in self.layers:
            tokens = layer(tokens, time_cond)
        return self.actions_to_pred_flow(self.final_actions_norm(tokens))


def buggy() -> nn.Module:
    """Adaptive norm after the feed-forward network."""
    return PiZero(layerscale=False)


def healthy() -> nn.Module:
    """Adaptive layer scale after the feed-forward network."""
    return PiZero(layerscale=True)


def _forward(model: nn.Module, actions: torch.Tensor) -> torch.Tensor:
    return model(actions, torch.full((len(actions),), 0.3, dtype=actions.dtype, device=actions.device))


def _loss(model: nn.Module, actions: torch.Tensor) -> torch.Tensor:
    noise = torch.randn(actions.shape, generator=torch.Generator().manual_seed(0)).to(actions)
    return F.mse_loss(_forward(model, noise.lerp(actions, 0.3)), actions - noise)


def buggy_declared() -> ModelSpec:
    """State a bidirectional model of action vectors at a fixed time, and the flow loss."""
    return ModelSpec.of(
        buggy, inputs="vectors", width=DIM_ACTION, causal=False, max_length=32, forward=_forward, loss=_loss
    )


def healthy_declared() -> ModelSpec:
    """State a bidirectional model of action vectors at a fixed time, and the flow loss."""
    return ModelSpec.of(
        healthy, inputs="vectors", width=DIM_ACTION, causal=False, max_length=32, forward=_forward, loss=_loss
    )


@torch.no_grad()
def observe(model: nn.Module) -> torch.Tensor:
    """Return the branch for a doubled output of the feed-forward network, minus twice the branch."""
    layer, cond = model.layers[0], torch.ones(1, 32)
    layer.ff_ada_rmsnorm.to_beta.weight.zero_()
    nn.init.zeros_(layer.to_actions_out.weight)
    nn.init.zeros_(layer.to_actions_out.bias)
    x = torch.randn(1, 4, 32, generator=torch.Generator().manual_seed(1))
    branch = layer(x, cond) - x
    layer.ff_out.weight.mul_(2)
    layer.ff_out.bias.mul_(2)
    return (layer(x, cond) - x - 2 * branch).abs().amax(dim=-1)
