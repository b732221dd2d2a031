"""mad-lab#3 (athms/mad-lab): the model initialises Mamba's step projection again, like any linear layer.

The layer chooses weight and bias so that steps are between dt_min and dt_max. The wrapper then overwrites
both with a small normal weight and a zero bias: all steps start near 0.7.
https://github.com/athms/mad-lab/issues/3
"""

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from stackwise import ModelSpec

DT_MIN, DT_MAX = 0.001, 0.1


class Mamba(nn.Module):
    """Selective state-space layer."""

    def __init__(self, dim: int, d_state: int = 8, d_conv: int = 4) -> None:
        super().__init__()
        inner, self.d_state, self.dt_rank = 2 * dim, d_state, max(1, dim // 16)
        self.in_proj, self.out_proj = nn.Linear(dim, 2 * inner, bias=False), nn.Linear(inner, dim, bias=False)
        self.conv1d = nn.Conv1d(inner, inner, d_conv, groups=inner, padding=d_conv - 1)
        self.x_proj = nn.Linear(inner, self.dt_rank + 2 * d_state, bias=False)
        self.dt_proj = nn.Linear(self.dt_rank, inner)
        nn.init.uniform_(self.dt_proj.weight, -(self.dt_rank**-0.5), self.dt_rank**-0.5)
        dt = torch.exp(torch.rand(inner) * math.log(DT_MAX / DT_MIN) + math.log(DT_MIN))
        with torch.no_grad():
            self.dt_proj.bias.copy_(dt + torch.log(-torch.expm1(-dt)))
        self.dt_proj.bias._no_reinit = True
        self.A_log = nn.Parameter(torch.arange(1.0, d_state + 1).log().repeat(inner, 1))
        self.D = nn.Parameter(torch.ones(inner))

    def forward(self, x: Tensor) -> Tensor:
        """Output (batch, length, dim)."""
        u, z = self.in_proj(x).chunk(2, dim=-1)
        u = F.silu(self.conv1d(u.transpose(1, 2))[..., : x.shape[1]].transpose(1, 2))
        low, b, c = self.x_proj(u).split([self.dt_rank, self.d_state, self.d_state], dim=-1)
        dt = F.softplus(self.dt_proj(low))
        decay = torch.exp(dt[..., None] * -self.A_log.exp())
        update = (dt * u)[..., None] * b[:, :, None]
        state, outputs = torch.zeros_like(update[:, 0]), []
        for t in range(x.shape[1]):
            state = decay[:, t] * state + update[:, t]
            outputs.append((state * c[:, t, None]).sum(-1))
        return self.out_proj((torch.stack(outputs, dim=1) + self.D * u) * F.silu(z))


class LanguageModel(nn.Module):
    """Wrapper of layers that initialises all of them."""

    def __init__(self, keeps: bool, vocab_size: int = 48, dim: int = 32) -> None:
        super().__init__()
        self.keeps = keeps
        self.token_embeds = nn.Embedding(vocab_size, dim)
        self.layers = nn.ModuleList(Mamba(dim) for _ in range(2))
        self.norms = nn.ModuleList(nn.RMSNorm(dim) for _ in range(3))
        self.head = nn.Linear(dim, vocab_size, bias=False)
        self.apply(self._init_weights)

    def _init_weights(self, m: nn.Module, initializer_range: float = 0.02) -> None:
        if isinstance(m, nn.Linear):
            if self.keeps and getattr(m.bias, "_no_reinit", False):
                return
            nn.init.normal_(m.weight, mean=0.0, std=initializer_range)
            if m.bias is not None:
                nn.init.zeros_(m.bias)
        elif isinstance(m, nn.Embedding):
            nn.init.normal_(m.weight, mean=0.0, std=initializer_range)

    def forward(self, inputs_ids: Tensor) -> Tensor:
        """Logits."""
        x = self.token_embeds(inputs_ids)
        for norm, layer in zip(self.norms, self.layers, strict=False):
            x = x + layer(norm(x))
        return self.head(self.norms[-1](x))


def buggy() -> nn.Module:
    """Overwrites the step projection."""
    return LanguageModel(keeps=False)


def healthy() -> nn.Module:
    """Leaves it."""
    return LanguageModel(keeps=True)


def declared(make: Callable[[], nn.Module]) -> ModelSpec:
    """A causal model."""
    return ModelSpec.of(make, causal=True)


def observe(model: nn.Module) -> Tensor:
    """Distance of the steps at the start to the range from dt_min to dt_max."""
    steps = F.softplus(model.layers[0].dt_proj.bias.detach())
    return (steps - steps.clamp(DT_MIN * 0.999, DT_MAX * 1.001)).abs()
