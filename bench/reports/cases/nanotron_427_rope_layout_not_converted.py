"""nanotron#427 (huggingface/nanotron): the conversion of a Llama to transformers ignores `rope_interleaved`.

The function that permutes queries and keys for another layout has an argument for it, which no caller passes.
"""

import functools
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from stackwise import ModelSpec

VOCAB, DIM, HEAD_DIM, MLP = 64, 32, 8, 48
ROWS = [DIM, DIM // 2, DIM // 2]  # of queries, keys and values


def rotate(x: Tensor, interleaved: bool) -> Tensor:
    """Rotate neighbours in (batch, heads, time, width), or elements i and i + width / 2."""
    dtype, half = torch.promote_types(x.dtype, torch.float32), x.shape[-1] // 2
    frequencies = 10000 ** -(torch.arange(half, device=x.device, dtype=dtype) / half)
    angles = torch.arange(x.shape[2], device=x.device)[:, None] * frequencies
    cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
    a, b = x.unflatten(-1, (-1, 2)).unbind(-1) if interleaved else x.chunk(2, dim=-1)
    pairs = torch.stack([a * cos - b * sin, b * cos + a * sin], dim=-1)
    return pairs.flatten(-2) if interleaved else pairs.mT.flatten(-2)


class DecoderLayer(nn.Module):
    """Grouped-query attention and a gated MLP."""

    def __init__(self, fused: bool, rope_interleaved: bool) -> None:
        super().__init__()
        self.fused, self.rope_interleaved = fused, rope_interleaved
        self.input_layernorm, self.post_attention_layernorm = nn.RMSNorm(DIM, 1e-6), nn.RMSNorm(DIM, 1e-6)
        if fused:
            self.qkv_proj = nn.Linear(DIM, sum(ROWS), bias=False)
        else:
            self.q_proj, self.k_proj, self.v_proj = (nn.Linear(DIM, rows, bias=False) for rows in ROWS)
        self.gate_proj, self.up_proj = nn.Linear(DIM, MLP, bias=False), nn.Linear(DIM, MLP, bias=False)
        self.o_proj, self.down_proj = nn.Linear(DIM, DIM, bias=False), nn.Linear(MLP, DIM, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y = self.input_layernorm(x)
        projections = (self.qkv_proj,) if self.fused else (self.q_proj, self.k_proj, self.v_proj)
        qkv = torch.cat([projection(y) for projection in projections], dim=-1)
        q, k, v = (y.unflatten(-1, (-1, HEAD_DIM)).transpose(1, 2) for y in qkv.split(ROWS, dim=-1))
        q, k = rotate(q, self.rope_interleaved), rotate(k, self.rope_interleaved)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        x = x + self.o_proj(y.transpose(1, 2).flatten(2))
        y = self.post_attention_layernorm(x)
        return x + self.down_proj(F.silu(self.gate_proj(y)) * self.up_proj(y))


class Llama(nn.Module):
    """Language model of transformers, or of nanotron (fused)."""

    def __init__(self, fused: bool = False, interleaved: bool = False, interleave_qkv: bool = False) -> None:
        super().__init__()
        self.converted = functools.partial(convert_nt_to_hf, interleave_qkv=interleave_qkv)
        self.embed_tokens, self.norm = nn.Embedding(VOCAB, DIM), nn.RMSNorm(DIM, 1e-6)
        self.layers = nn.ModuleList(DecoderLayer(fused, interleaved) for _ in range(2))
        self.lm_head = nn.Linear(DIM, VOCAB, bias=False)

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.embed_tokens(input_ids)
        for layer in self.layers:
            x = layer(x)
        return self.lm_head(self.norm(x))


def convert_nt_to_hf(state: dict[str, Tensor], interleave_qkv: bool = False) -> dict[str, Tensor]:
    """Weights of transformers from those of nanotron."""
    new = {name: weight for name, weight in state.items() if "qkv" not in name}
    for name in [name for name in state if "qkv" in name]:
        for part, weight in zip("qkv", state[name].split(ROWS), strict=True):
            pairs = weight.view(-1, HEAD_DIM // 2, 2, DIM).transpose(1, 2).reshape(-1, DIM)
            new[name.replace("qkv", part)] = pairs if interleave_qkv and part != "v" else weight
    return new


def buggy() -> nn.Module:
    return Llama(fused=True, interleaved=True, interleave_qkv=False)


def healthy() -> nn.Module:
    return Llama(fused=True, interleaved=True, interleave_qkv=True)


def declared(make: Callable[[], nn.Module]) -> ModelSpec:
    """The converted weights give the same results in transformers."""
    return ModelSpec.of(make, causal=True, reference=Llama, to_reference=make().converted)


@torch.no_grad()
def observe(model: nn.Module) -> Tensor:
    """Logits, less those of the converted model (first entries)."""
    weights, ids = model.converted(model.state_dict()), torch.arange(3, 15)[None]
    return (model(ids) - torch.func.functional_call(Llama(), weights, (ids,)))[0, -3:, :4]
