"""ViT-CIFAR#12 (omihub777/ViT-CIFAR): attention scores are divided by the root of the whole width.

MultiHeadSelfAttention uses sqrt(feats) although each head has only feats / head features.
"""

import torch
import torch.nn.functional as F
from torch import nn

from stackwise import Facts, ModelSpec

DECLARATION = "attention scores are scaled by 1 / sqrt(head dimension), as in Vaswani et al."


class MultiHeadSelfAttention(nn.Module):
    """Multi-head self-attention over patches."""

    def __init__(self, feats: int, head: int, fixed: bool, dropout: float = 0.0) -> None:
        super().__init__()
        self.head, self.feats = head, feats
        self.sqrt_d = (feats // head if fixed else feats) ** 0.5
        self.q = nn.Linear(feats, feats)
        self.k = nn.Linear(feats, feats)
        self.v = nn.Linear(feats, feats)
        self.o = nn.Linear(feats, feats)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Mix patches."""
        b, n, _ = x.size()
        q, k, v = (f(x).view(b, n, self.head, -1).transpose(1, 2) for f in (self.q, self.k, self.v))
        score = F.softmax(torch.einsum("bhif,bhjf->bhij", q, k) / self.sqrt_d, dim=-1)
        attn = torch.einsum("bhij,bhjf->bihf", score, v)
        return self.dropout(self.o(attn.flatten(2)))


class TransformerEncoder(nn.Module):
    """Pre-norm encoder block."""

    def __init__(self, feats: int, mlp_hidden: int, head: int, fixed: bool) -> None:
        super().__init__()
        self.la1, self.la2 = nn.LayerNorm(feats), nn.LayerNorm(feats)
        self.msa = MultiHeadSelfAttention(feats, head, fixed)
        self.mlp = nn.Sequential(
            nn.Linear(feats, mlp_hidden), nn.GELU(), nn.Linear(mlp_hidden, feats), nn.GELU()
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Attention and MLP with residuals."""
        out = self.msa(self.la1(x)) + x
        return self.mlp(self.la2(out)) + out


class ViT(nn.Module):
    """Image classifier with a class token."""

    def __init__(
        self,
        fixed: bool,
        in_c: int = 3,
        num_classes: int = 10,
        img_size: int = 16,
        patch: int = 4,
        hidden: int = 48,
        head: int = 8,
        num_layers: int = 3,
    ) -> None:
        super().__init__()
        self.patch_size = img_size // patch
        self.emb = nn.Linear(self.patch_size**2 * in_c, hidden)
        self.cls_token = nn.Parameter(torch.randn(1, 1, hidden))
        self.pos_emb = nn.Parameter(torch.randn(1, patch**2 + 1, hidden))
        self.enc = nn.Sequential(
            *(TransformerEncoder(hidden, 2 * hidden, head, fixed) for _ in range(num_layers))
        )
        self.fc = nn.Sequential(nn.LayerNorm(hidden), nn.Linear(hidden, num_classes))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Images (b, c, h, w) to class scores."""
        words = F.unfold(x, self.patch_size, stride=self.patch_size).transpose(1, 2)
        out = torch.cat([self.cls_token.expand(x.size(0), -1, -1), self.emb(words)], dim=1)
        return self.fc(self.enc(out + self.pos_emb)[:, 0])


def buggy() -> nn.Module:
    """Scale by the width."""
    return ViT(fixed=False)


def healthy() -> nn.Module:
    """Scale by the head dimension."""
    return ViT(fixed=True)


def buggy_declared() -> ModelSpec:
    """State that scores are divided by the root of 6, the size of a head."""
    return ModelSpec.of(buggy, facts=Facts(attention_scale=6**-0.5))


def healthy_declared() -> ModelSpec:
    """State that scores are divided by the root of 6, the size of a head."""
    return ModelSpec.of(healthy, facts=Facts(attention_scale=6**-0.5))


def observe(model: nn.Module) -> torch.Tensor:
    """First attention's output minus PyTorch's scaled dot-product attention on it; 0 is right."""
    model = model.double().eval()
    msa, seen = model.enc[0].msa, []
    handle = msa.register_forward_hook(lambda _m, args, out: seen.extend((args[0], out)))
    images = torch.linspace(0, 50, 2 * 3 * 16 * 16, dtype=torch.float64).sin().view(2, 3, 16, 16)
    with torch.no_grad():
        model(images)
        handle.remove()
        q, k, v = (f(seen[0]).unflatten(-1, (msa.head, -1)).transpose(1, 2) for f in (msa.q, msa.k, msa.v))
        right = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        return seen[1] - msa.o(right)
