"""mamba#910 (state-spaces/mamba): Mamba2Simple normalises all groups of its output together.

With `ngroups` > 1 each group has a scale of its own, but the gated RMSNorm is built without `group_size`.
"""

import torch
import torch.nn.functional as F
from torch import nn

from stackwise import ModelSpec


class RMSNormGated(nn.Module):
    """RMSNorm of the gated input, over groups of `group_size` channels."""

    def __init__(self, hidden_size: int, group_size: int | None = None, eps: float = 1e-5) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(hidden_size)), eps
        self.group_size = group_size or hidden_size

    def forward(self, x: torch.Tensor, z: torch.Tensor) -> torch.Tensor:
        """`z` is the gate."""
        x = (x * F.silu(z)).unflatten(-1, (-1, self.group_size))
        return (x * (x.square().mean(dim=-1, keepdim=True) + self.eps).rsqrt()).flatten(-2) * self.weight


class Mamba2Simple(nn.Module):
    """State-space layer with a scalar decay for each head; heads of a group share B and C."""

    def __init__(
        self, d_model: int, d_state: int = 4, headdim: int = 16, ngroups: int = 2, *, grouped_norm: bool
    ) -> None:
        super().__init__()
        self.d_inner, self.d_state, self.headdim, self.ngroups = 2 * d_model, d_state, headdim, ngroups
        self.nheads = self.d_inner // headdim
        conv_dim = self.d_inner + 2 * ngroups * d_state
        self.in_proj = nn.Linear(d_model, self.d_inner + conv_dim + self.nheads, bias=False)
        self.conv1d = nn.Conv1d(conv_dim, conv_dim, 4, groups=conv_dim, padding=3)
        self.dt_bias = nn.Parameter(torch.linspace(-4.0, -1.0, self.nheads))
        self.A_log = nn.Parameter(torch.arange(1.0, self.nheads + 1).log())
        self.D = nn.Parameter(torch.ones(self.nheads))
        self.norm = RMSNormGated(self.d_inner, self.d_inner // ngroups if grouped_norm else None)
        self.out_proj = nn.Linear(self.d_inner, d_model, bias=False)

    def forward(self, u: torch.Tensor) -> torch.Tensor:
        """`u` is (batch, time, d_model)."""
        conv_dim = self.conv1d.in_channels
        z, xBC, dt = self.in_proj(u).split([self.d_inner, conv_dim, self.nheads], dim=-1)
        xBC = F.silu(self.conv1d(xBC.transpose(1, 2))[..., : u.shape[1]].transpose(1, 2))
        x, B, C = xBC.split([self.d_inner, *[self.ngroups * self.d_state] * 2], dim=-1)
        x = x.unflatten(-1, (self.nheads, self.headdim))
        B, C = (
            y.unflatten(-1, (self.ngroups, -1)).repeat_interleave(self.nheads // self.ngroups, dim=2)
            for y in (B, C)
        )
        dt = F.softplus(dt + self.dt_bias)
        decay, update = (-dt * self.A_log.exp()).exp(), (dt[..., None] * x)[..., None] * B[..., None, :]
        state, outputs = torch.zeros_like(update[:, 0]), []
        for t in range(u.shape[1]):
            state = decay[:, t, :, None, None] * state + update[:, t]
            outputs.append((state @ C[:, t, ..., None]).squeeze(-1))
        y = torch.stack(outputs, dim=1) + self.D[:, None] * x
        return self.out_proj(self.norm(y.flatten(2), z))


class MambaLMHeadModel(nn.Module):
    """Mamba-2 language model."""

    def __init__(self, *, grouped_norm: bool, vocab_size: int = 66, d_model: int = 32) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocab_size, d_model)
        self.norms = nn.ModuleList(nn.RMSNorm(d_model) for _ in range(2))
        self.mixers = nn.ModuleList(Mamba2Simple(d_model, grouped_norm=grouped_norm) for _ in range(2))
        self.norm_f, self.lm_head = nn.RMSNorm(d_model), nn.Linear(d_model, vocab_size, bias=False)

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        """Return logits."""
        x = self.embedding(input_ids)
        for norm, mixer in zip(self.norms, self.mixers, strict=True):
            x = x + mixer(norm(x))
        return self.lm_head(self.norm_f(x))


def buggy() -> nn.Module:
    """One group for the norm."""
    return MambaLMHeadModel(grouped_norm=False)


def healthy() -> nn.Module:
    """`ngroups` groups for the norm, as in Mamba2."""
    return MambaLMHeadModel(grouped_norm=True)


def buggy_declared() -> ModelSpec:
    """The model is causal."""
    return ModelSpec.of(buggy, causal=True)


def healthy_declared() -> ModelSpec:
    """The model is causal."""
    return ModelSpec.of(healthy, causal=True)


@torch.no_grad()
def observe(model: nn.Module) -> torch.Tensor:
    """Change of the second group of the normalised output if the first group is scaled; 0 is right."""
    norm = model.mixers[0].norm.double()
    generator = torch.Generator().manual_seed(1)
    x, z = torch.randn(2, 3, 5, 64, dtype=torch.float64, generator=generator).unbind()
    scaled = torch.cat([10 * x[..., :32], x[..., 32:]], dim=-1)
    return (norm(scaled, z) - norm(x, z))[..., 32:]
