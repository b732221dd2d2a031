"""unsloth#1066 (unslothai/unsloth): after the prefill, tokens attend to the padding on the left.

With a cache, only the last column of the attention mask is kept, so that all cached keys are visible.
"""

from collections.abc import Callable
from types import SimpleNamespace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from stackwise import ModelSpec

VOCAB, DIM, HEADS = 64, 32, 4
Opt, Cache = Tensor | None, list[Tensor | None] | None


def rotate(x: Tensor, start: int) -> Tensor:
    """Rotate (batch, heads, time, width), whose first position is `start`."""
    dtype, half = torch.promote_types(x.dtype, torch.float32), x.shape[-1] // 2
    frequencies = 10000 ** -(torch.arange(half, device=x.device, dtype=dtype) / half)
    angles = torch.arange(start, start + x.shape[2], device=x.device)[:, None] * frequencies
    (a, b), cos, sin = x.chunk(2, dim=-1), angles.cos().to(x.dtype), angles.sin().to(x.dtype)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)


class LlamaDecoderLayer(nn.Module):
    """Rotary attention and a gated MLP, each after its norm."""

    def __init__(self) -> None:
        super().__init__()
        self.input_layernorm, self.post_attention_layernorm = nn.RMSNorm(DIM, 1e-6), nn.RMSNorm(DIM, 1e-6)
        self.qkv_proj, self.o_proj = nn.Linear(DIM, 3 * DIM, bias=False), nn.Linear(DIM, DIM, bias=False)
        self.gate_up_proj, self.down_proj = nn.Linear(DIM, 128, bias=False), nn.Linear(64, DIM, bias=False)

    def forward(self, x: Tensor, keep: Tensor, past: Tensor | None) -> tuple[Tensor, Tensor]:
        """`keep` (batch, keys) is True at visible keys."""
        qkv = self.qkv_proj(self.input_layernorm(x)).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        start, key = keep.shape[1] - x.shape[1], torch.arange(keep.shape[1], device=x.device)
        kv = torch.stack([rotate(qkv[1], start), qkv[2]])
        kv = kv if past is None else torch.cat([past, kv], dim=3)
        mask = (key <= key[start:, None]) & keep[:, None, None] | (key == key[start:, None])
        y = F.scaled_dot_product_attention(rotate(qkv[0], start), kv[0], kv[1], attn_mask=mask)
        x = x + self.o_proj(y.transpose(1, 2).flatten(2))
        gate, up = self.gate_up_proj(self.post_attention_layernorm(x)).chunk(2, dim=-1)
        return x + self.down_proj(F.silu(gate) * up), kv


class LlamaForCausalLM(nn.Module):
    """Language model with a cache. Keys before those of a short attention mask are visible."""

    def __init__(self, *, whole_mask: bool) -> None:
        super().__init__()
        self.whole_mask, self.embed_tokens = whole_mask, nn.Embedding(VOCAB, DIM)
        self.layers = nn.ModuleList(LlamaDecoderLayer() for _ in range(2))
        self.norm, self.lm_head = nn.RMSNorm(DIM, 1e-6), nn.Linear(DIM, VOCAB, bias=False)

    def forward(self, input_ids: Tensor, attention_mask: Opt = None, past_key_values: Cache = None) -> object:
        x, cache = self.embed_tokens(input_ids), list(past_key_values or [None, None])
        n_keys = x.shape[1] + (0 if cache[0] is None else cache[0].shape[3])
        keep = torch.ones_like(input_ids) if attention_mask is None else attention_mask
        keep = F.pad(keep, (n_keys - keep.shape[1], 0), value=1).bool()
        for i, layer in enumerate(self.layers):
            x, cache[i] = layer(x, keep, cache[i])
        return SimpleNamespace(logits=self.lm_head(self.norm(x)), past_key_values=cache)

    @torch.no_grad()
    def generate(self, input_ids: Tensor, attention_mask: Tensor, max_new_tokens: int = 20) -> Tensor:
        ids, mask, cache = input_ids, attention_mask, None
        for _ in range(max_new_tokens):
            outputs = self(ids, mask, cache)
            ids, cache = outputs.logits[:, -1:].argmax(-1), outputs.past_key_values
            input_ids = torch.cat([input_ids, ids], dim=1)
            attention_mask = F.pad(attention_mask, (0, 1), value=1)
            mask = attention_mask if self.whole_mask else attention_mask[:, [-1]]
        return input_ids


def buggy() -> nn.Module:
    return LlamaForCausalLM(whole_mask=False)


def healthy() -> nn.Module:
    return LlamaForCausalLM(whole_mask=True)


def _generate(model: nn.Module, prompts: list[Tensor], *, max_new_tokens: int) -> Tensor:
    ids = nn.utils.rnn.pad_sequence(prompts, batch_first=True, padding_value=-1, padding_side="left")
    return model.generate(ids.clamp(min=0), ids.ge(0).long(), max_new_tokens)[:, ids.shape[1] :]


def declared(make: Callable[[], nn.Module]) -> ModelSpec:
    return ModelSpec.of(make, causal=True, padding_sides=("left", "right"), generate=_generate)


def observe(model: nn.Module) -> Tensor:
    """Whether each token after a padded prompt is that after the prompt alone."""
    rows = [torch.arange(5, 9), torch.arange(20, 32)]
    return _generate(model, rows, max_new_tokens=12)[0] == _generate(model, rows[:1], max_new_tokens=12)[0]
