"""SliME#3 (yfzhang114/SliME): noisy gating takes the size of its noise from the gate's own weights.

While training, `softplus(x @ w_gate)` scales the noise of the router where `softplus(x @ w_noise)` should, so
`w_noise` is never used and the gate's logits decide how noisy they are.
"""

import torch
import torch.nn.functional as F
from torch import nn


class GatedProjector(nn.Module):
    """Maps vision features to the width of the language model, with one MLP and one attention expert."""

    def __init__(self, vision: int, hidden: int, *, noise_from_gate: bool, eps: float = 1e-2) -> None:
        super().__init__()
        self.noise_from_gate, self.eps = noise_from_gate, eps
        self.mixer = nn.MultiheadAttention(vision, 2, batch_first=True)
        self.projection = nn.Sequential(nn.Linear(vision, hidden), nn.GELU(), nn.Linear(hidden, hidden))
        self.w_gate = nn.Parameter(torch.zeros(vision, 2))
        self.w_noise = nn.Parameter(torch.zeros(vision, 2))

    def gates(self, x: torch.Tensor) -> torch.Tensor:
        """Weights of the two experts, noisy while training."""
        logits = x @ self.w_gate
        if self.training:
            raw = x @ (self.w_gate if self.noise_from_gate else self.w_noise)
            logits = logits + torch.randn_like(logits) * (F.softplus(raw) + self.eps)
        return logits.softmax(-1)

    def experts(self, x: torch.Tensor) -> torch.Tensor:
        """Outputs of both experts, stacked last."""
        mixed, _ = self.mixer(x, x, x, need_weights=False)
        return torch.stack([self.projection(x), self.projection(mixed)], -1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Project (B, patches, vision) to (B, patches, hidden)."""
        return (self.experts(x) @ self.gates(x)[..., None]).squeeze(-1)


class SlimeForCausalLM(nn.Module):
    """Tiny LLaVA: projected image features come before the text."""

    def __init__(self, *, noise_from_gate: bool, vocab: int = 50, hidden: int = 32, vision: int = 24) -> None:
        super().__init__()
        self.mm_projector = GatedProjector(vision, hidden, noise_from_gate=noise_from_gate)
        self.embed_tokens = nn.Embedding(vocab, hidden)
        self.positions = nn.Embedding(64, hidden)
        self.block = nn.TransformerEncoderLayer(hidden, 4, 64, dropout=0.0, batch_first=True, norm_first=True)
        self.lm_head = nn.Linear(hidden, vocab)

    def forward(
        self, input_ids: torch.Tensor, images: torch.Tensor | None = None, labels: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, ...]:
        """Return (logits,) of the text, or (loss, logits) with labels."""
        x = self.embed_tokens(input_ids)
        if images is not None:
            x = torch.cat([self.mm_projector(images), x], 1)
        x = x + self.positions.weight[: x.shape[1]]
        hidden_future = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1)
        logits = self.lm_head(self.block(x, src_mask=hidden_future))[:, -input_ids.shape[1] :]
        if labels is None:
            return (logits,)
        return F.cross_entropy(
            logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), ignore_index=-100
        ), logits


def buggy() -> nn.Module:
    """The gate's weights scale the noise."""
    return SlimeForCausalLM(noise_from_gate=True)


def healthy() -> nn.Module:
    """The noise has weights of its own."""
    return SlimeForCausalLM(noise_from_gate=False)


@torch.no_grad()
def observe(model: nn.Module) -> torch.Tensor:
    """Training output of the projector against the formula of noisy gating, with the same noise."""
    model = model.double().train()
    projector = model.mm_projector
    generator = torch.Generator().manual_seed(1)
    features = torch.randn(2, 9, 24, dtype=torch.float64, generator=generator)
    # Both start as zeros; training moves them apart.
    projector.w_gate.copy_(torch.randn(24, 2, dtype=torch.float64, generator=generator))
    projector.w_noise.copy_(torch.randn(24, 2, dtype=torch.float64, generator=generator))
    torch.manual_seed(2)
    noise = torch.randn(2, 9, 2, dtype=torch.float64)
    spread = torch.log1p((features @ projector.w_noise).exp()) + projector.eps
    gates = torch.softmax(features @ projector.w_gate + noise * spread, -1)
    expected = (projector.experts(features) * gates[:, :, None]).sum(-1)
    torch.manual_seed(2)
    return projector(features) - expected
