"""xformers#183 (facebookresearch/xformers): keys in FAVOR have other random features than queries.

The product of the features of a query and a key approximates exp(q k) only if both use the same random
directions. The code builds one feature map for queries and another one for keys. The product is then mostly
noise, and attention hardly depends on the similarity of q and k.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from stackwise import ModelSpec

MAX_LENGTH = 64


class SMOrf(nn.Module):
    """Positive features of the softmax kernel from orthogonal random directions, drawn once."""

    def __init__(self, dim_head: int, dim_features: int) -> None:
        super().__init__()
        blocks = [
            torch.linalg.qr(torch.randn(dim_head, dim_head))[0] for _ in range(dim_features // dim_head)
        ]
        lengths = torch.randn(dim_features, dim_head).norm(dim=1)
        self.register_buffer("features", (torch.cat(blocks) * lengths[:, None]).t())

    def forward(self, x: Tensor) -> Tensor:
        """Return (batch, heads, time, dim_features). A factor that the normalisation cancels is left out."""
        x = x * x.shape[-1] ** -0.25
        log = x @ self.features - x.square().sum(dim=-1, keepdim=True) / 2
        return (log - log.detach().amax(dim=(-2, -1), keepdim=True)).exp()


class FavorAttention(nn.Module):
    """Attention that is linear in the length."""

    def __init__(self, dim_head: int, dim_features: int, *, same_features: bool) -> None:
        super().__init__()
        self.feature_map_query = SMOrf(dim_head, dim_features)
        self.feature_map_key = self.feature_map_query if same_features else SMOrf(dim_head, dim_features)

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Return (batch, heads, time, channels)."""
        q_prime, k_prime = self.feature_map_query(q), self.feature_map_key(k)
        att_normalization = q_prime @ k_prime.sum(dim=-2)[..., None]
        return q_prime @ (k_prime.transpose(-2, -1) @ v) / att_normalization


class EncoderBlock(nn.Module):
    """Attention and MLP, with a norm before each."""

    def __init__(self, dim: int, heads: int, *, same_features: bool) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.q_proj, self.k_proj, self.v_proj, self.proj = (nn.Linear(dim, dim) for _ in range(4))
        self.attention = FavorAttention(dim // heads, 64, same_features=same_features)
        self.mlp = nn.Sequential(nn.Linear(dim, 4 * dim), nn.GELU(), nn.Linear(4 * dim, dim))

    def forward(self, x: Tensor) -> Tensor:
        """Apply the block to (batch, time, dim)."""
        h = self.norm1(x)
        q, k, v = (
            p(h).unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for p in (self.q_proj, self.k_proj, self.v_proj)
        )
        x = x + self.proj(self.attention(q, k, v).transpose(1, 2).flatten(2))
        return x + self.mlp(self.norm2(x))


class XFormerEncoder(nn.Module):
    """Ids -> logits of the id at each masked position."""

    def __init__(self, *, same_features: bool, vocab_size: int = 58, dim: int = 32) -> None:
        super().__init__()
        self.word_embeddings = nn.Embedding(vocab_size, dim)
        self.position_embeddings = nn.Embedding(MAX_LENGTH, dim)
        self.encoders = nn.ModuleList(EncoderBlock(dim, 4, same_features=same_features) for _ in range(2))
        self.norm, self.head = nn.LayerNorm(dim), nn.Linear(dim, vocab_size)

    def forward(self, src: Tensor) -> Tensor:
        """Return logits (batch, time, vocabulary)."""
        x = self.word_embeddings(src) + self.position_embeddings.weight[: src.shape[1]]
        for encoder in self.encoders:
            x = encoder(x)
        return self.head(self.norm(x))


def buggy() -> nn.Module:
    """A feature map for queries and another one for keys."""
    return XFormerEncoder(same_features=False)


def healthy() -> nn.Module:
    """One feature map."""
    return XFormerEncoder(same_features=True)


def _loss(model: nn.Module, src: Tensor) -> Tensor:
    """Cross-entropy at every third position, which the id 0 replaces."""
    masked = torch.arange(src.shape[1], device=src.device) % 3 == 1
    logits = model(src.masked_fill(masked, 0))
    return F.cross_entropy(logits[:, masked].flatten(0, 1), src[:, masked].flatten())


def declared(make: Callable[[], nn.Module]) -> ModelSpec:
    """State a bidirectional model and its loss at masked positions."""
    return ModelSpec.of(make, inputs="tokens", width=58, causal=False, max_length=MAX_LENGTH, loss=_loss)


@torch.no_grad()
def observe(model: nn.Module) -> Tensor:
    """Return the kernel matrix of six vectors minus its transpose. The kernel exp(x y) is symmetric."""
    model = model.double().eval()
    attention = model.encoders[0].attention
    x = torch.randn(1, 1, 6, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    kernel = attention.feature_map_query(x) @ attention.feature_map_key(x).transpose(-2, -1)
    return (kernel - kernel.transpose(-2, -1)) / kernel.norm()
