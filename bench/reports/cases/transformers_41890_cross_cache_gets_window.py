"""transformers#41890 (huggingface/transformers): the cross-attention cache of T5Gemma takes over the window.

The cache of the encoder states gets the layer types of the decoder. A layer with a sliding window keeps only
the last encoder states after the first step, and the mask is cut to their number.
"""

from collections.abc import Callable
from types import SimpleNamespace

import torch
import torch.nn.functional as F
from torch import nn

from stackwise import ModelSpec

WINDOW, VOCAB, WIDTH, HEADS = 5, 72, 32, 4


class DynamicCache:
    """Keys and values of each layer; a layer with a window keeps only what the next token can see."""

    def __init__(self, windows: tuple[int | None, ...]) -> None:
        self.windows, self.layers, self.seen = windows, [None] * len(windows), [0] * len(windows)

    def update(self, kv: torch.Tensor, layer_idx: int) -> torch.Tensor:
        """Return the kept and the new states (2, batch, heads, time, head_dim)."""
        past, window = self.layers[layer_idx], self.windows[layer_idx]
        kv = kv if past is None else torch.cat([past, kv], dim=3)
        self.layers[layer_idx] = kv if window is None else kv[:, :, :, 1 - window :]
        self.seen[layer_idx] += kv.shape[3] - (0 if past is None else past.shape[3])
        return kv


class EncoderDecoderCache:
    """Cache of the self-attention and of the cross-attention."""

    def __init__(self, *, plain_cross: bool) -> None:
        self.self_attention = DynamicCache((WINDOW, None))
        self.cross_attention = DynamicCache((None, None) if plain_cross else (WINDOW, None))


def rotate(x: torch.Tensor, start: int) -> torch.Tensor:
    """Rotate (batch, heads, time, head_dim), whose first position is `start`."""
    half = x.shape[-1] // 2
    freqs = 10000.0 ** (-torch.arange(half, device=x.device, dtype=x.dtype) / half)
    angles = torch.arange(start, start + x.shape[2], device=x.device, dtype=x.dtype)[:, None] * freqs
    a, b = x.chunk(2, dim=-1)
    return torch.cat([a * angles.cos() - b * angles.sin(), b * angles.cos() + a * angles.sin()], dim=-1)


class Attention(nn.Module):
    """Projections of an attention layer."""

    def __init__(self) -> None:
        super().__init__()
        self.q_proj, self.o_proj = nn.Linear(WIDTH, WIDTH, bias=False), nn.Linear(WIDTH, WIDTH, bias=False)
        self.kv_proj = nn.Linear(WIDTH, 2 * WIDTH, bias=False)

    def query(self, x: torch.Tensor) -> torch.Tensor:
        """Return (batch, heads, time, head_dim)."""
        return self.q_proj(x).unflatten(-1, (HEADS, -1)).transpose(1, 2)

    def key_value(self, x: torch.Tensor) -> torch.Tensor:
        """Return (2, batch, heads, time, head_dim)."""
        return self.kv_proj(x).unflatten(-1, (2, HEADS, -1)).permute(2, 0, 3, 1, 4)

    def forward(self, q: torch.Tensor, kv: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """Attend to the keys where `mask` is True."""
        y = F.scaled_dot_product_attention(q, kv[0], kv[1], attn_mask=mask)
        return self.o_proj(y.transpose(1, 2).flatten(2))


def mlp() -> nn.Module:
    """Return the feed-forward network."""
    return nn.Sequential(nn.Linear(WIDTH, 64), nn.GELU(approximate="tanh"), nn.Linear(64, WIDTH))


class EncoderLayer(nn.Module):
    """Bidirectional layer."""

    def __init__(self) -> None:
        super().__init__()
        self.self_attn, self.mlp = Attention(), mlp()
        self.pre_self_attn_layernorm, self.pre_feedforward_layernorm = nn.RMSNorm(WIDTH), nn.RMSNorm(WIDTH)

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """Apply the layer to (batch, time, width)."""
        y = self.pre_self_attn_layernorm(x)
        kv = self.self_attn.key_value(y)
        kv = torch.stack([rotate(kv[0], 0), kv[1]])
        x = x + self.self_attn(rotate(self.self_attn.query(y), 0), kv, mask)
        return x + self.mlp(self.pre_feedforward_layernorm(x))


class DecoderLayer(nn.Module):
    """Causal self-attention, cross-attention to all encoder states, and feed-forward network."""

    def __init__(self, layer_idx: int, window: int | None) -> None:
        super().__init__()
        self.layer_idx, self.window = layer_idx, window
        self.self_attn, self.cross_attn, self.mlp = Attention(), Attention(), mlp()
        self.pre_self_attn_layernorm, self.pre_feedforward_layernorm = nn.RMSNorm(WIDTH), nn.RMSNorm(WIDTH)
        self.pre_cross_attn_layernorm = nn.RMSNorm(WIDTH)

    def forward(
        self, x: torch.Tensor, encoder: torch.Tensor, mask: torch.Tensor, cache: EncoderDecoderCache | None
    ) -> torch.Tensor:
        """`mask` is that of the encoder states, (batch, 1, 1, time)."""
        start = 0 if cache is None else cache.self_attention.seen[self.layer_idx]
        y = self.pre_self_attn_layernorm(x)
        kv = self.self_attn.key_value(y)
        kv = torch.stack([rotate(kv[0], start), kv[1]])
        if cache is not None:
            kv = cache.self_attention.update(kv, self.layer_idx)
        stop = start + x.shape[1]
        keys = torch.arange(stop - kv.shape[3], stop, device=x.device)
        back = torch.arange(start, stop, device=x.device)[:, None] - keys
        visible = (back >= 0) & (back < (self.window or stop))
        x = x + self.self_attn(rotate(self.self_attn.query(y), start), kv, visible)
        if cache is None:
            kv = self.cross_attn.key_value(encoder)
        elif (kv := cache.cross_attention.layers[self.layer_idx]) is None:
            kv = cache.cross_attention.update(self.cross_attn.key_value(encoder), self.layer_idx)
        query = self.cross_attn.query(self.pre_cross_attn_layernorm(x))
        x = x + self.cross_attn(query, kv, mask[..., : kv.shape[3]])
        return x + self.mlp(self.pre_feedforward_layernorm(x))


class T5GemmaForConditionalGeneration(nn.Module):
    """Encoder-decoder; the first decoder layer has a sliding window."""

    def __init__(self, *, plain_cross: bool) -> None:
        super().__init__()
        self.plain_cross = plain_cross
        self.encoder_embed_tokens, self.decoder_embed_tokens = (nn.Embedding(VOCAB, WIDTH) for _ in range(2))
        self.encoder_layers = nn.ModuleList(EncoderLayer() for _ in range(2))
        self.decoder_layers = nn.ModuleList(DecoderLayer(i, w) for i, w in enumerate((WINDOW, None)))
        self.encoder_norm, self.norm = nn.RMSNorm(WIDTH), nn.RMSNorm(WIDTH)
        self.lm_head = nn.Linear(WIDTH, VOCAB, bias=False)

    def encode(self, input_ids: torch.Tensor, attention_mask: torch.Tensor | None = None) -> torch.Tensor:
        """Return the encoder states."""
        mask = torch.ones_like(input_ids) if attention_mask is None else attention_mask
        x = self.encoder_embed_tokens(input_ids)
        for layer in self.encoder_layers:
            x = layer(x, mask.bool()[:, None, None])
        return self.encoder_norm(x)

    def forward(
        self,
        input_ids: torch.Tensor,
        decoder_input_ids: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        past_key_values: EncoderDecoderCache | None = None,
        encoder_outputs: torch.Tensor | None = None,
        use_cache: bool = False,
    ) -> SimpleNamespace:
        """Return logits of the decoder, the cache and the encoder states."""
        mask = torch.ones_like(input_ids) if attention_mask is None else attention_mask
        encoder = self.encode(input_ids, mask) if encoder_outputs is None else encoder_outputs
        if use_cache and past_key_values is None:
            past_key_values = EncoderDecoderCache(plain_cross=self.plain_cross)
        x = self.decoder_embed_tokens(decoder_input_ids)
        for layer in self.decoder_layers:
            x = layer(x, encoder, mask.bool()[:, None, None], past_key_values)
        logits = self.lm_head(self.norm(x))
        return SimpleNamespace(logits=logits, past_key_values=past_key_values, encoder_outputs=encoder)


def buggy() -> nn.Module:
    """Cross-attention cache with the window of the decoder layer."""
    return T5GemmaForConditionalGeneration(plain_cross=False)


def healthy() -> nn.Module:
    """Cross-attention cache without a window."""
    return T5GemmaForConditionalGeneration(plain_cross=True)


def _source(tokens: torch.Tensor) -> torch.Tensor:
    """Return the same source of nine tokens for each row."""
    return (torch.arange(9, device=tokens.device) * 7 % VOCAB).expand(len(tokens), -1)


def _decode(
    model: nn.Module, tokens: torch.Tensor, cache: EncoderDecoderCache | None
) -> tuple[torch.Tensor, EncoderDecoderCache]:
    out = model(_source(tokens), decoder_input_ids=tokens, past_key_values=cache, use_cache=True)
    return out.logits, out.past_key_values


def declared(make: Callable[[], nn.Module]) -> ModelSpec:
    """State the decoder with a fixed source, and its cache."""
    return ModelSpec.of(
        make,
        inputs="tokens",
        width=VOCAB,
        causal=True,
        forward=lambda model, tokens: model(_source(tokens), decoder_input_ids=tokens).logits,
        decode=_decode,
    )


@torch.no_grad()
def observe(model: nn.Module) -> torch.Tensor:
    """Return the logits of single steps with a cache minus those of one call without it."""
    ids = torch.randint(0, VOCAB, (2, 8), generator=torch.Generator().manual_seed(1))
    cache, steps = None, []
    for i in range(8):
        logits, cache = _decode(model, ids[:, i : i + 1], cache)
        steps.append(logits)
    return torch.cat(steps, dim=1) - model(_source(ids), decoder_input_ids=ids).logits
