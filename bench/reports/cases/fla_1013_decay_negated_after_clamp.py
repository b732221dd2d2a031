"""flash-linear-attention#1013 (fla-org/flash-linear-attention): the decay of Mamba-3 is a positive constant.

`A = -F.softplus(dd_A).clamp(max=-A_floor)` clamps before it negates. Softplus is positive, so A is always
+A_floor. The state grows a little in each step, and dd_A gets no gradient. A should be negated first.
"""

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from stackwise import ModelSpec


class Mamba3(nn.Module):
    """Selective state space layer with a trapezoidal rule and data-dependent rotations."""

    def __init__(
        self, hidden_size: int, state_size: int, head_dim: int, *, negate_first: bool, A_floor: float = 1e-4
    ) -> None:
        super().__init__()
        self.negate_first, self.A_floor, self.head_dim = negate_first, A_floor, head_dim
        self.intermediate_size = 2 * hidden_size
        self.num_heads = self.intermediate_size // head_dim
        self.num_rope_angles = state_size // 4
        self.sizes = [self.intermediate_size] * 2 + [state_size] * 2 + [self.num_heads] * 3
        self.sizes.append(self.num_rope_angles)
        self.in_proj = nn.Linear(hidden_size, sum(self.sizes), bias=False)
        dt = torch.exp(torch.rand(self.num_heads) * math.log(0.1 / 0.001) + math.log(0.001))
        self.dt_bias = nn.Parameter(dt + torch.log(-torch.expm1(-dt)))
        self.B_bias = nn.Parameter(torch.ones(self.num_heads, state_size))
        self.C_bias = nn.Parameter(torch.ones(self.num_heads, state_size))
        self.B_norm, self.C_norm = nn.RMSNorm(state_size, eps=1e-5), nn.RMSNorm(state_size, eps=1e-5)
        self.D = nn.Parameter(torch.ones(self.num_heads))
        self.out_proj = nn.Linear(self.intermediate_size, hidden_size, bias=False)

    def compute_a(self, dd_A: Tensor) -> Tensor:
        """Return the decay rate of each head."""
        if self.negate_first:
            return (-F.softplus(dd_A)).clamp(max=-self.A_floor)
        return -F.softplus(dd_A).clamp(max=-self.A_floor)

    def rotate(self, x: Tensor, angles: Tensor) -> Tensor:
        """Rotate the first half of the state channels of (batch, time, heads, state) in pairs."""
        rotated, rest = x.chunk(2, dim=-1)
        a, b = rotated[..., ::2], rotated[..., 1::2]
        cos, sin = angles.cos(), angles.sin()
        rotated = torch.stack([a * cos - b * sin, a * sin + b * cos], dim=-1).flatten(-2)
        return torch.cat([rotated, rest], dim=-1)

    def forward(self, hidden_states: Tensor) -> Tensor:
        """Apply the layer to (batch, time, hidden_size)."""
        z, x, B, C, dd_dt, dd_A, trap, angles = self.in_proj(hidden_states).split(self.sizes, dim=-1)
        x = x.unflatten(-1, (-1, self.head_dim))
        A, DT, trap = self.compute_a(dd_A), F.softplus(dd_dt + self.dt_bias), trap.sigmoid()
        turned = (angles[:, :, None] * DT[..., None]).cumsum(dim=1)
        B = self.rotate(self.B_norm(B)[:, :, None] + self.B_bias, turned)
        C = self.rotate(self.C_norm(C)[:, :, None] + self.C_bias, turned)
        decay, inputs = (A * DT).exp()[..., None, None], x[..., None] * B[..., None, :]
        now, before = (trap * DT)[..., None, None], ((1 - trap) * DT)[..., None, None] * decay
        state, last, ys = torch.zeros_like(inputs[:, 0]), torch.zeros_like(inputs[:, 0]), []
        for t in range(x.shape[1]):
            state = decay[:, t] * state + before[:, t] * last + now[:, t] * inputs[:, t]
            last = inputs[:, t]
            ys.append((state * C[:, t, :, None]).sum(dim=-1))
        y = torch.stack(ys, dim=1) + x * self.D[:, None]
        return self.out_proj(y.flatten(2) * F.silu(z))


class Mamba3Block(nn.Module):
    """Norm and mixer."""

    def __init__(self, hidden_size: int, *, negate_first: bool) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(hidden_size, eps=1e-5)
        self.mixer = Mamba3(hidden_size, 8, 16, negate_first=negate_first)

    def forward(self, x: Tensor) -> Tensor:
        """Apply the block to (batch, time, hidden_size)."""
        return x + self.mixer(self.norm(x))


class Mamba3ForCausalLM(nn.Module):
    """Language model."""

    def __init__(self, *, negate_first: bool, vocab_size: int = 56, hidden_size: int = 32) -> None:
        super().__init__()
        self.embeddings = nn.Embedding(vocab_size, hidden_size)
        self.layers = nn.ModuleList(Mamba3Block(hidden_size, negate_first=negate_first) for _ in range(2))
        self.norm_f = nn.RMSNorm(hidden_size, eps=1e-5)
        self.lm_head = nn.Linear(hidden_size, vocab_size, bias=False)

    def forward(self, input_ids: Tensor) -> Tensor:
        """Return logits."""
        x = self.embeddings(input_ids)
        for layer in self.layers:
            x = layer(x)
        return self.lm_head(self.norm_f(x))


def buggy() -> nn.Module:
    """Clamp, then negate."""
    return Mamba3ForCausalLM(negate_first=False)


def healthy() -> nn.Module:
    """Negate, then clamp."""
    return Mamba3ForCausalLM(negate_first=True)


def declared(make: Callable[[], nn.Module]) -> ModelSpec:
    """State a causal model with a head of its own."""
    return ModelSpec.of(make, inputs="tokens", width=56, causal=True, tied=False)


@torch.no_grad()
def observe(model: nn.Module) -> Tensor:
    """Return the number of decay rates that are positive, of 7."""
    return (model.layers[0].mixer.compute_a(torch.linspace(-3, 3, 7)) > 0).sum()
