"""vector-quantize-pytorch#162 (lucidrains): a shared codebook changes between two quantisers of one pass.

Each quantiser of the residual stack updates the averages of the codebook, so that in training the next one
reads other codes than in eval mode. https://github.com/lucidrains/vector-quantize-pytorch/issues/162
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from stackwise import ModelSpec


class Codebook(nn.Module):
    """Codes that are exponential averages of the vectors that chose them."""

    def __init__(self, codes: int, dim: int, decay: float = 0.8) -> None:
        super().__init__()
        self.decay = decay
        self.register_buffer("embed", torch.randn(codes, dim))
        self.register_buffer("cluster_size", torch.ones(codes))
        self.register_buffer("embed_avg", self.embed.clone())

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Nearest codes and their numbers."""
        indices = torch.cdist(x, self.embed.expand(len(x), -1, -1)).argmin(dim=-1)
        return F.embedding(indices, self.embed), indices

    @torch.no_grad()
    def update(self, x: Tensor, indices: Tensor) -> None:
        """Move codes to the vectors that chose them."""
        chosen = F.one_hot(indices.flatten(), len(self.embed)).to(x.dtype)
        self.cluster_size.lerp_(chosen.sum(dim=0), 1 - self.decay)
        self.embed_avg.lerp_(chosen.T @ x.flatten(0, 1), 1 - self.decay)
        self.embed.copy_(self.embed_avg / self.cluster_size.clamp(min=1e-3)[:, None])


class ResidualVQ(nn.Module):
    """Quantisers that share one codebook."""

    def __init__(self, dim: int, codes: int, num_quantizers: int, update_at_end: bool) -> None:
        super().__init__()
        self.num_quantizers, self.update_at_end = num_quantizers, update_at_end
        self.codebook = Codebook(codes, dim)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Quantised vectors, indices, commitment loss."""
        residual, out, loss, seen, numbers = x, torch.zeros_like(x), x.new_zeros(()), [], []
        for _ in range(self.num_quantizers):
            quantized, indices = self.codebook(residual.detach())
            loss = loss + F.mse_loss(residual, quantized)
            seen.append((residual.detach(), indices))
            if self.training and not self.update_at_end:
                self.codebook.update(*seen[-1])
            residual, out = residual - quantized, out + quantized
            numbers.append(indices)
        if self.training and self.update_at_end:
            for each in seen:
                self.codebook.update(*each)
        return x + (out - x).detach(), torch.stack(numbers, dim=-1), loss


class Tokenizer(nn.Module):
    """Transformer autoencoder of features with a discrete bottleneck."""

    def __init__(self, update_at_end: bool, features: int = 12, dim: int = 16) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(dim, 2, 2 * dim, dropout=0.0, batch_first=True, norm_first=True)
        self.encoder = nn.Sequential(nn.Linear(features, dim), nn.TransformerEncoder(layer, 1, None, False))
        self.vq = ResidualVQ(dim, 8, 3, update_at_end)
        self.decoder = nn.Sequential(nn.TransformerEncoder(layer, 1, None, False), nn.Linear(dim, features))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Reconstruction, indices, commitment loss."""
        quantized, indices, loss = self.vq(self.encoder(x))
        return self.decoder(quantized), indices, loss


def buggy() -> nn.Module:
    """Updates after each quantiser."""
    return Tokenizer(update_at_end=False)


def healthy() -> nn.Module:
    """Updates after the last quantiser."""
    return Tokenizer(update_at_end=True)


def _loss(model: nn.Module, x: Tensor) -> Tensor:
    reconstruction, _, commitment = model(x)
    return F.mse_loss(reconstruction, x) + 0.25 * commitment


def declared(make: Callable[[], nn.Module]) -> ModelSpec:
    """Loss of reconstruction and commitment."""
    return ModelSpec.of(make, inputs="vectors", width=12, causal=False, loss=_loss)


def observe(model: nn.Module) -> Tensor:
    """Output in eval mode less output in training mode, without dropout, from the same state."""
    x = torch.randn(2, 10, 12, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        return model.eval()(x)[0] - model.train()(x)[0]
