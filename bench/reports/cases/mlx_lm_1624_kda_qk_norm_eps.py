"""mlx-lm#1624 (ml-explore/mlx-lm): Kimi Linear normalises q and k with an epsilon head_dim times too big.

It uses RMSNorm, which adds 1e-6 to the mean of squares, where the reference L2 norm adds it to the sum; small
q and k come out too small and the recurrent state carries the error to later tokens.
"""

import copy

import torch
import torch.nn.functional as F
from torch import nn

DECLARATION = "q and k are L2-normalised as x / sqrt(sum(x^2) + 1e-6), as in the reference KDA kernels"


class ShortConv1d(nn.Conv1d):
    """Causal depthwise convolution and SiLU."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(B, T, channels) to the same shape."""
        return F.silu(super().forward(F.pad(x.transpose(1, 2), (3, 0))).transpose(1, 2))


class KimiDeltaAttention(nn.Module):
    """Delta rule with a decay per channel."""

    def __init__(self, hidden: int, num_heads: int, head_dim: int, eps: float) -> None:
        super().__init__()
        self.num_heads, self.head_dim, self.eps = num_heads, head_dim, eps
        width = num_heads * head_dim
        self.q_proj, self.k_proj, self.v_proj = (nn.Linear(hidden, width, bias=False) for _ in range(3))
        convs = (ShortConv1d(width, width, 4, groups=width, bias=False) for _ in range(3))
        self.q_conv, self.k_conv, self.v_conv = convs
        self.f_a_proj = nn.Linear(hidden, head_dim, bias=False)
        self.f_b_proj = nn.Linear(head_dim, width, bias=False)
        self.b_proj = nn.Linear(hidden, num_heads, bias=False)
        self.g_proj = nn.Linear(hidden, width, bias=False)
        self.A_log = nn.Parameter(torch.empty(num_heads, 1).uniform_(1, 16).log())
        self.dt_bias = nn.Parameter(torch.zeros(num_heads, head_dim))
        self.o_norm, self.o_proj = nn.RMSNorm(head_dim, eps=1e-5), nn.Linear(width, hidden, bias=False)

    def normalize_qk(self, q: torch.Tensor, k: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Unit length for both, and the attention scale for q."""
        q, k = (F.rms_norm(t, (self.head_dim,), eps=self.eps) for t in (q, k))
        return q / self.head_dim, k * self.head_dim**-0.5

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Run the recurrence over (B, T, hidden)."""
        shape = (self.num_heads, self.head_dim)
        q, k, v = self.q_conv(self.q_proj(x)), self.k_conv(self.k_proj(x)), self.v_conv(self.v_proj(x))
        q, k, v = (t.unflatten(-1, shape) for t in (q, k, v))
        q, k = self.normalize_qk(q, k)
        dt = F.softplus(self.f_b_proj(self.f_a_proj(x)).unflatten(-1, shape) + self.dt_bias)
        decay, beta = torch.exp(-self.A_log.exp() * dt), self.b_proj(x).sigmoid()
        state, out = x.new_zeros(x.shape[0], *shape, self.head_dim), []
        for t in range(x.shape[1]):
            state = state * decay[:, t, :, :, None]
            error = v[:, t] - torch.einsum("bhkv,bhk->bhv", state, k[:, t])
            state = state + torch.einsum("bhk,bhv->bhkv", k[:, t], beta[:, t, :, None] * error)
            out.append(torch.einsum("bhkv,bhk->bhv", state, q[:, t]))
        y = self.o_norm(torch.stack(out, dim=1)) * self.g_proj(x).unflatten(-1, shape).sigmoid()
        return self.o_proj(y.flatten(2))


class KimiLinear(nn.Module):
    """Language model of KDA and MLP layers."""

    def __init__(self, per_head_dim_eps: bool, hidden: int = 32, head_dim: int = 16, vocab: int = 64) -> None:
        super().__init__()
        eps = 1e-6 / head_dim if per_head_dim_eps else 1e-6
        self.embed_tokens = nn.Embedding(vocab, hidden)
        self.self_attn = nn.ModuleList(KimiDeltaAttention(hidden, 2, head_dim, eps) for _ in range(2))
        self.input_norm = nn.ModuleList(nn.RMSNorm(hidden) for _ in range(2))
        self.mlp_norm = nn.ModuleList(nn.RMSNorm(hidden) for _ in range(2))
        self.mlp = nn.ModuleList(nn.Linear(hidden, hidden) for _ in range(2))
        self.norm, self.lm_head = nn.RMSNorm(hidden), nn.Linear(hidden, vocab, bias=False)
        for m in self.modules():
            if isinstance(m, (nn.Linear, nn.Embedding)):
                nn.init.normal_(m.weight, std=0.02)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Logits (B, T, vocab) for ids (B, T)."""
        h = self.embed_tokens(inputs)
        for i, attn in enumerate(self.self_attn):
            h = h + attn(self.input_norm[i](h))
            h = h + F.silu(self.mlp[i](self.mlp_norm[i](h)))
        return self.lm_head(self.norm(h))


def buggy() -> nn.Module:
    """As reported."""
    return KimiLinear(per_head_dim_eps=False)


def healthy() -> nn.Module:
    """As fixed."""
    return KimiLinear(per_head_dim_eps=True)


@torch.no_grad()
def observe(model: nn.Module) -> torch.Tensor:
    """Logits in float64 minus those with the reference L2 norm, relative to their spread."""
    model, ids = copy.deepcopy(model).double(), torch.arange(24).view(2, 12)
    logits = model(ids)
    for attn in model.self_attn:
        attn.normalize_qk = lambda q, k: (
            q / (q.square().sum(-1, keepdim=True) + 1e-6).sqrt() * q.shape[-1] ** -0.5,
            k / (k.square().sum(-1, keepdim=True) + 1e-6).sqrt(),
        )
    return (logits - model(ids)) / logits.std()
