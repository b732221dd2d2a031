"""hyper-connections#8 (lucidrains/hyper-connections): the residual streams are not mixed.

The width connection computes the input of the branch and the mixed streams, but returns the streams as they
came in. The branch output is added to these, so the mixing weights have no effect and get no gradient.
https://github.com/lucidrains/hyper-connections/issues/8
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from stackwise import ModelSpec

VOCAB, DIM, HEADS, STREAMS, MAX_LENGTH = 52, 32, 4, 3, 64


class HyperConnections(nn.Module):
    """Residual streams around a branch, with static and dynamic weights (arXiv:2409.19606)."""

    def __init__(self, branch: nn.Module, layer_index: int, *, mixed: bool) -> None:
        super().__init__()
        self.branch, self.mixed, self.norm = branch, mixed, nn.RMSNorm(DIM)
        to_branch = torch.zeros(STREAMS, 1)
        to_branch[layer_index % STREAMS] = 1.0
        self.static_alpha = nn.Parameter(torch.cat([to_branch, torch.eye(STREAMS)], dim=1))
        self.dynamic_alpha_fn = nn.Parameter(torch.zeros(DIM, 1 + STREAMS))
        self.dynamic_alpha_scale = nn.Parameter(torch.tensor(1e-2))
        self.static_beta = nn.Parameter(torch.ones(STREAMS))
        self.dynamic_beta_fn = nn.Parameter(torch.zeros(DIM))
        self.dynamic_beta_scale = nn.Parameter(torch.tensor(1e-2))

    def width_connection(self, streams: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the input of the branch, the streams and the weights of the branch output."""
        normed = self.norm(streams)
        alpha = (normed @ self.dynamic_alpha_fn).tanh() * self.dynamic_alpha_scale + self.static_alpha
        beta = (normed @ self.dynamic_beta_fn).tanh() * self.dynamic_beta_scale + self.static_beta
        mix_h = torch.einsum("...st,...sd->...td", alpha, streams)
        branch_input, mixed_streams = mix_h[..., 0, :], mix_h[..., 1:, :]
        return branch_input, (mixed_streams if self.mixed else streams), beta

    def forward(self, streams: Tensor) -> Tensor:
        """Apply the branch to (batch, time, STREAMS, DIM)."""
        branch_input, streams, beta = self.width_connection(streams)
        return streams + beta[..., None] * self.branch(branch_input)[..., None, :]


class Attention(nn.Module):
    """Causal attention."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(DIM)
        self.to_qkv, self.to_out = nn.Linear(DIM, 3 * DIM, bias=False), nn.Linear(DIM, DIM, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """`x` is (batch, time, DIM)."""
        qkv = self.to_qkv(self.norm(x)).unflatten(-1, (3, HEADS, -1))
        q, k, v = (y.transpose(1, 2) for y in qkv.unbind(2))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.to_out(y.transpose(1, 2).flatten(2))


class FeedForward(nn.Sequential):
    """Feed-forward network."""

    def __init__(self) -> None:
        super().__init__(nn.RMSNorm(DIM), nn.Linear(DIM, 4 * DIM), nn.GELU(), nn.Linear(4 * DIM, DIM))


class GPT(nn.Module):
    """Language model with hyper-connections instead of residual connections."""

    def __init__(self, *, mixed: bool, depth: int = 2) -> None:
        super().__init__()
        self.wte, self.wpe = nn.Embedding(VOCAB, DIM), nn.Embedding(MAX_LENGTH, DIM)
        branches = (branch() for _ in range(depth) for branch in (Attention, FeedForward))
        self.layers = nn.ModuleList(HyperConnections(each, i, mixed=mixed) for i, each in enumerate(branches))
        self.ln_f, self.lm_head = nn.RMSNorm(DIM), nn.Linear(DIM, VOCAB, bias=False)

    def forward(self, idx: Tensor) -> Tensor:
        """Return logits."""
        x = self.wte(idx) + self.wpe(torch.arange(idx.shape[1], device=idx.device))
        streams = x[..., None, :].expand(-1, -1, STREAMS, -1)
        for layer in self.layers:
            streams = layer(streams)
        return self.lm_head(self.ln_f(streams.sum(dim=-2)))


def buggy() -> nn.Module:
    """Return the streams that came in."""
    return GPT(mixed=False)


def healthy() -> nn.Module:
    """Return the mixed streams."""
    return GPT(mixed=True)


def declared(make: Callable[[], nn.Module]) -> ModelSpec:
    """State a causal language model."""
    return ModelSpec.of(
        make, inputs="tokens", width=VOCAB, causal=True, max_length=MAX_LENGTH, window=None, tied=False
    )


@torch.no_grad()
def observe(model: nn.Module) -> Tensor:
    """Return the streams behind a branch of zeros, minus their mix by the weights."""
    generator, layer = torch.Generator().manual_seed(1), model.layers[1]
    streams = torch.randn(2, 5, STREAMS, DIM, generator=generator)
    layer.static_alpha.copy_(torch.randn(STREAMS, 1 + STREAMS, generator=generator))
    layer.branch[-1].weight.zero_()
    layer.branch[-1].bias.zero_()
    return layer(streams) - torch.einsum("st,absd->abtd", layer.static_alpha[:, 1:], streams)
