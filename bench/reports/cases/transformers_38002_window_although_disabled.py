"""transformers#38002 (huggingface/transformers): Qwen2 has a window although `use_sliding_window` is False.

The mask is built with `sliding_window` of the configuration, whatever the switch says, so each layer loses
the tokens before the window. https://github.com/huggingface/transformers/issues/38002
"""

from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from stackwise import ModelSpec


@dataclass
class Qwen2Settings:
    """Configuration of a released checkpoint: it has a window, which is switched off."""

    vocab_size: int = 64
    hidden_size: int = 32
    num_attention_heads: int = 4
    num_key_value_heads: int = 2
    sliding_window: int = 6
    use_sliding_window: bool = False


class DynamicCache:
    """Keys and values of all layers."""

    def __init__(self) -> None:
        self.layers: dict[int, tuple[Tensor, Tensor]] = {}

    def get_seq_length(self) -> int:
        """Return the number of cached tokens."""
        return self.layers[0][0].shape[2] if self.layers else 0

    def update(self, keys: Tensor, values: Tensor, layer_idx: int) -> tuple[Tensor, Tensor]:
        """Append to a layer, and return all of its keys and values."""
        if layer_idx in self.layers:
            old_keys, old_values = self.layers[layer_idx]
            keys, values = torch.cat([old_keys, keys], dim=2), torch.cat([old_values, values], dim=2)
        self.layers[layer_idx] = keys, values
        return keys, values


def apply_rotary(x: Tensor, position_ids: Tensor) -> Tensor:
    """Rotate `x` (batch, heads, time, dim) by its positions (batch, time)."""
    half = x.shape[-1] // 2
    inv_freq = 1e6 ** (-torch.arange(half, device=x.device, dtype=torch.float64) / half)
    angles = position_ids[:, None, :, None].double() * inv_freq
    cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
    a, b = x.chunk(2, dim=-1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)


class Qwen2Layer(nn.Module):
    """Attention with biases of queries, keys and values, then a gated MLP."""

    def __init__(self, config: Qwen2Settings, layer_idx: int) -> None:
        super().__init__()
        dim, self.layer_idx = config.hidden_size, layer_idx
        self.head_dim = dim // config.num_attention_heads
        kv_dim = config.num_key_value_heads * self.head_dim
        self.q_proj, self.k_proj, self.v_proj = (nn.Linear(dim, n) for n in (dim, kv_dim, kv_dim))
        self.o_proj = nn.Linear(dim, dim, bias=False)
        self.gate_proj, self.up_proj = (nn.Linear(dim, 2 * dim, bias=False) for _ in range(2))
        self.down_proj = nn.Linear(2 * dim, dim, bias=False)
        self.input_layernorm, self.post_attention_layernorm = (nn.RMSNorm(dim, eps=1e-6) for _ in range(2))

    def forward(self, x: Tensor, mask: Tensor, position_ids: Tensor, cache: DynamicCache | None) -> Tensor:
        """One layer; `mask` is True for visible keys."""
        normed = self.input_layernorm(x)
        q, k, v = (
            proj(normed).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
            for proj in (self.q_proj, self.k_proj, self.v_proj)
        )
        q, k = apply_rotary(q, position_ids), apply_rotary(k, position_ids)
        if cache is not None:
            k, v = cache.update(k, v, self.layer_idx)
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)
        x = x + self.o_proj(y.transpose(1, 2).flatten(2))
        normed = self.post_attention_layernorm(x)
        return x + self.down_proj(F.silu(self.gate_proj(normed)) * self.up_proj(normed))


class Qwen2ForCausalLM(nn.Module):
    """Causal language model."""

    def __init__(self, settings: Qwen2Settings, *, reads_switch: bool) -> None:
        super().__init__()
        has_window = settings.use_sliding_window or not reads_switch
        self.window = settings.sliding_window if has_window else None
        self.embed_tokens = nn.Embedding(settings.vocab_size, settings.hidden_size)
        self.layers = nn.ModuleList(Qwen2Layer(settings, i) for i in range(3))
        self.norm = nn.RMSNorm(settings.hidden_size, eps=1e-6)
        self.lm_head = nn.Linear(settings.hidden_size, settings.vocab_size, bias=False)

    def _update_causal_mask(self, attention_mask: Tensor | None, past: int, length: int) -> Tensor:
        """Return the visible keys (batch or 1, 1, queries, keys)."""
        key = torch.arange(past + length, device=self.lm_head.weight.device)
        query = key[past:, None]
        visible = key <= query
        if self.window is not None:
            visible = visible & (key > query - self.window)
        visible = visible[None, None]
        if attention_mask is not None:
            visible = visible & attention_mask[:, None, None].bool()
        return visible | (key == query)  # a padding token reads itself

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: DynamicCache | None = None,
        labels: Tensor | None = None,
        use_cache: bool = True,
    ) -> SimpleNamespace:
        """Logits, and the mean loss of the next tokens; -100 is ignored."""
        cache = DynamicCache() if use_cache and past_key_values is None else past_key_values
        past, length = (0 if cache is None else cache.get_seq_length()), input_ids.shape[1]
        if position_ids is None:
            position_ids = torch.arange(past, past + length, device=input_ids.device)[None]
        mask, x = self._update_causal_mask(attention_mask, past, length), self.embed_tokens(input_ids)
        for layer in self.layers:
            x = layer(x, mask, position_ids, cache)
        logits, loss = self.lm_head(self.norm(x)), None
        if labels is not None:
            scores = logits.to(torch.promote_types(logits.dtype, torch.float32))
            loss = F.cross_entropy(scores[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
        return SimpleNamespace(loss=loss, logits=logits, past_key_values=cache)


def buggy() -> nn.Module:
    """The mask has the window."""
    return Qwen2ForCausalLM(Qwen2Settings(), reads_switch=False)


def healthy() -> nn.Module:
    """The window is switched off."""
    return Qwen2ForCausalLM(Qwen2Settings(), reads_switch=True)


def declared(make: Callable[[], nn.Module]) -> ModelSpec:
    """The model is causal, and each layer reads all earlier tokens."""
    return ModelSpec.of(make, causal=True, window=None, padding_sides=("left", "right"))


@torch.no_grad()
def observe(model: nn.Module) -> Tensor:
    """Change of the last logits by a window that is longer than the text."""
    model = model.double().eval()
    ids = torch.randint(64, (2, 14), generator=torch.Generator().manual_seed(1))
    logits = model(ids).logits[:, -1]
    model.window = 100
    return model(ids).logits[:, -1] - logits
