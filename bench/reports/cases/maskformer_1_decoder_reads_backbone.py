"""MaskFormer#1 (facebookresearch/MaskFormer): the decoder reads the backbone, not the Transformer encoder.

The pixel decoder applies a Transformer encoder to `res5`, the last features of the backbone. Its output
should be the memory of the Transformer decoder. But the head passes `res5` itself to the decoder.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from stackwise import ModelSpec

IMAGE, CLASSES, QUERIES = 16, 5, 6


def sine_positions(x: Tensor) -> Tensor:
    """Return the position embedding (height * width, channels) of features `x`."""
    height, width = x.shape[2:]
    rate = 100.0 ** (-torch.arange(x.shape[1] // 4, device=x.device).to(x) / (x.shape[1] // 4))
    rows, columns = (torch.arange(n, device=x.device).to(x)[:, None] * rate for n in (height, width))
    rows, columns = (torch.cat([t.sin(), t.cos()], dim=-1) for t in (rows, columns))
    return torch.cat(
        [rows[:, None].expand(-1, width, -1), columns[None].expand(height, -1, -1)], dim=-1
    ).flatten(0, 1)


class EncoderLayer(nn.Module):
    """Self-attention with positions in queries and keys, and a feed-forward network."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.self_attn = nn.MultiheadAttention(dim, heads, batch_first=True)
        self.ffn = nn.Sequential(nn.Linear(dim, 2 * dim), nn.ReLU(), nn.Linear(2 * dim, dim))
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)

    def forward(self, src: Tensor, pos: Tensor) -> Tensor:
        """`src` is (batch, pixels, dim)."""
        q = src + pos
        src = self.norm1(src + self.self_attn(q, q, src, need_weights=False)[0])
        return self.norm2(src + self.ffn(src))


class DecoderLayer(nn.Module):
    """Self-attention of the queries, attention to the memory, and a feed-forward network."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.self_attn = nn.MultiheadAttention(dim, heads, batch_first=True)
        self.multihead_attn = nn.MultiheadAttention(dim, heads, batch_first=True)
        self.ffn = nn.Sequential(nn.Linear(dim, 2 * dim), nn.ReLU(), nn.Linear(2 * dim, dim))
        self.norm1, self.norm2, self.norm3 = (nn.LayerNorm(dim) for _ in range(3))

    def forward(self, tgt: Tensor, memory: Tensor, pos: Tensor, query_pos: Tensor) -> Tensor:
        """`tgt` is (batch, queries, dim), `memory` is (batch, pixels, dim)."""
        q = tgt + query_pos
        tgt = self.norm1(tgt + self.self_attn(q, q, tgt, need_weights=False)[0])
        attended = self.multihead_attn(tgt + query_pos, memory + pos, memory, need_weights=False)[0]
        tgt = self.norm2(tgt + attended)
        return self.norm3(tgt + self.ffn(tgt))


class TransformerEncoderPixelDecoder(nn.Module):
    """Transformer encoder over `res5`, and features at the resolution of `res2`."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.input_proj, self.lateral = nn.Conv2d(dim, dim, 1), nn.Conv2d(dim // 2, dim, 1)
        self.transformer = nn.ModuleList(EncoderLayer(dim, heads) for _ in range(2))
        self.output, self.mask_features = nn.Conv2d(dim, dim, 3, padding=1), nn.Conv2d(dim, dim, 3, padding=1)
        self.norm = nn.GroupNorm(4, dim)

    def forward_features(self, features: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        """Return the features for the masks, and those of the Transformer encoder."""
        x = self.input_proj(features["res5"])
        pos, y = sine_positions(x), x.flatten(2).transpose(1, 2)
        for layer in self.transformer:
            y = layer(y, pos)
        encoded = y.transpose(1, 2).unflatten(2, x.shape[2:])
        y = self.lateral(features["res2"]) + F.interpolate(encoded, scale_factor=2, mode="nearest")
        return self.mask_features(F.relu(self.norm(self.output(y)))), encoded


class TransformerPredictor(nn.Module):
    """Transformer decoder: queries -> a class and a mask for each of them."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.query_embed = nn.Embedding(QUERIES, dim)
        self.layers, self.norm = nn.ModuleList(DecoderLayer(dim, heads) for _ in range(2)), nn.LayerNorm(dim)
        self.class_embed = nn.Linear(dim, CLASSES + 1)
        self.mask_embed = nn.Sequential(nn.Linear(dim, dim), nn.ReLU(), nn.Linear(dim, dim))

    def forward(self, x: Tensor, mask_features: Tensor) -> dict[str, Tensor]:
        """`x` is the memory (batch, dim, height, width)."""
        pos, memory = sine_positions(x), x.flatten(2).transpose(1, 2)
        query_pos = self.query_embed.weight.expand(len(x), -1, -1)
        tgt = torch.zeros_like(query_pos)
        for layer in self.layers:
            tgt = layer(tgt, memory, pos, query_pos)
        tgt = self.norm(tgt)
        masks = torch.einsum("bqc,bchw->bqhw", self.mask_embed(tgt), mask_features)
        return {"pred_logits": self.class_embed(tgt), "pred_masks": masks}


class MaskFormer(nn.Module):
    """Image -> scores of classes at each pixel of half the resolution."""

    def __init__(self, *, reads_encoder: bool, dim: int = 32, heads: int = 4) -> None:
        super().__init__()
        self.reads_encoder = reads_encoder
        self.res2 = nn.Sequential(
            nn.Conv2d(3, dim // 2, 3, stride=2, padding=1), nn.GroupNorm(4, dim // 2), nn.ReLU()
        )
        self.res5 = nn.Sequential(
            nn.Conv2d(dim // 2, dim, 3, stride=2, padding=1), nn.GroupNorm(4, dim), nn.ReLU()
        )
        self.pixel_decoder = TransformerEncoderPixelDecoder(dim, heads)
        self.predictor = TransformerPredictor(dim, heads)

    def predictions(self, images: Tensor) -> dict[str, Tensor]:
        """Return the classes and masks of the queries."""
        features = {"res2": self.res2(images)}
        features["res5"] = self.res5(features["res2"])
        mask_features, transformer_encoder_features = self.pixel_decoder.forward_features(features)
        memory = transformer_encoder_features if self.reads_encoder else features["res5"]
        return self.predictor(memory, mask_features)

    def forward(self, images: Tensor) -> Tensor:
        """`images` is (batch, 3, height, width), both multiples of 4."""
        out = self.predictions(images)
        mask_cls = out["pred_logits"].softmax(dim=-1)[..., :-1]
        return torch.einsum("bqc,bqhw->bchw", mask_cls, out["pred_masks"].sigmoid())


def buggy() -> nn.Module:
    """Pass the features of the backbone."""
    return MaskFormer(reads_encoder=False)


def healthy() -> nn.Module:
    """Pass the features of the Transformer encoder."""
    return MaskFormer(reads_encoder=True)


def _make_batch(batch_size: int, _: int, generator: torch.Generator) -> Tensor:
    return torch.randn(batch_size, 3, IMAGE, IMAGE, generator=generator)


def declared(make: Callable[[], nn.Module]) -> ModelSpec:
    """State images."""
    return ModelSpec.of(make, make_batch=_make_batch, per_position=False, causal=False)


def observe(model: nn.Module) -> Tensor:
    """Return the number of parameters of the Transformer encoder that the classes do not depend on."""
    out = model.predictions(_make_batch(2, 0, torch.Generator().manual_seed(1)))
    parameters = list(model.pixel_decoder.transformer.parameters())
    grads = torch.autograd.grad(out["pred_logits"].square().sum(), parameters, allow_unused=True)
    return torch.tensor(sum(grad is None for grad in grads))
