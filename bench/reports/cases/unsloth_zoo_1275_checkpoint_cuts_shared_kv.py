"""unsloth-zoo#1275 (unslothai/unsloth-zoo): checkpointing cuts the gradient of shared keys and values.

The last layers of Gemma-3n use the keys and values of an earlier layer. Checkpointed layers read them from a
store, and what a checkpointed function does not get as an argument is a constant. The loss does not change.
https://github.com/unslothai/unsloth-zoo/pull/1275
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from stackwise import ModelSpec

SharedKV = tuple[Tensor, Tensor]


@dataclass
class CausalLMOutput:
    """Loss (with labels) and logits."""

    loss: Tensor | None
    logits: Tensor


def rope(x: Tensor) -> Tensor:
    """Rotate `x` (batch, heads, time, dim) by its positions."""
    half = x.shape[-1] // 2
    inv_freq = 10000.0 ** (-torch.arange(half, device=x.device, dtype=x.dtype) / half)
    angle = torch.arange(x.shape[2], device=x.device)[:, None].to(x.dtype) * inv_freq
    a, b = x.chunk(2, dim=-1)
    return torch.cat((a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()), dim=-1)


class Attention(nn.Module):
    """Attention; a shared layer has no keys and values of its own."""

    def __init__(self, dim: int, heads: int, *, is_shared: bool) -> None:
        super().__init__()
        self.heads, head_dim = heads, dim // heads
        self.q_proj, self.o_proj = (nn.Linear(dim, dim, bias=False) for _ in range(2))
        self.q_norm = nn.RMSNorm(head_dim, eps=1e-6)
        if not is_shared:
            self.k_proj, self.v_proj = (nn.Linear(dim, head_dim, bias=False) for _ in range(2))
            self.k_norm = nn.RMSNorm(head_dim, eps=1e-6)

    def keys_and_values(self, x: Tensor) -> SharedKV:
        """Return keys and values (batch, 1, time, dim) for all heads."""
        k, v = self.k_proj(x)[:, None], self.v_proj(x)[:, None]
        return rope(self.k_norm(k)), F.rms_norm(v, v.shape[-1:], eps=1e-6)

    def forward(self, x: Tensor, kv: SharedKV, mask: Tensor) -> Tensor:
        """`mask` is True for visible keys."""
        q = rope(self.q_norm(self.q_proj(x).unflatten(-1, (self.heads, -1)).transpose(1, 2)))
        y = F.scaled_dot_product_attention(q, *kv, attn_mask=mask, enable_gqa=True)
        return self.o_proj(y.transpose(1, 2).flatten(2))


class DecoderLayer(nn.Module):
    """Attention, then a gated MLP."""

    def __init__(self, dim: int, heads: int, *, is_shared: bool) -> None:
        super().__init__()
        self.is_shared = is_shared
        self.self_attn = Attention(dim, heads, is_shared=is_shared)
        self.gate_proj, self.up_proj = (nn.Linear(dim, 2 * dim, bias=False) for _ in range(2))
        self.down_proj = nn.Linear(2 * dim, dim, bias=False)
        self.input_layernorm, self.pre_feedforward_layernorm = (nn.RMSNorm(dim, eps=1e-6) for _ in range(2))

    def forward(self, x: Tensor, mask: Tensor, *shared: Tensor) -> tuple[Tensor, ...]:
        """Return the output, and the keys and values used."""
        h = self.input_layernorm(x)
        k, v = shared if self.is_shared else self.self_attn.keys_and_values(h)
        x = x + self.self_attn(h, (k, v), mask)
        h = self.pre_feedforward_layernorm(x)
        return x + self.down_proj(F.gelu(self.gate_proj(h), approximate="tanh") * self.up_proj(h)), k, v


class Gemma3n(nn.Module):
    """Language model, trained with checkpointing; the last two of four layers share keys and values."""

    def __init__(self, *, kv_as_argument: bool, vocab_size: int = 64, dim: int = 32) -> None:
        super().__init__()
        self.kv_as_argument, self.gradient_checkpointing = kv_as_argument, True
        self.embed_tokens = nn.Embedding(vocab_size, dim)
        nn.init.normal_(self.embed_tokens.weight, std=dim**-0.5)
        self.layers = nn.ModuleList(DecoderLayer(dim, 4, is_shared=i >= 2) for i in range(4))
        self.norm = nn.RMSNorm(dim, eps=1e-6)

    def _run(
        self, layer: nn.Module, x: Tensor, mask: Tensor, store: tuple[Tensor, ...]
    ) -> tuple[Tensor, ...]:
        """Run a layer, and recompute it in the backward pass of a training step."""
        if not (self.gradient_checkpointing and self.training and torch.is_grad_enabled()):
            return layer(x, mask, *store)
        if self.kv_as_argument:
            return checkpoint(layer, x, mask, *store, use_reentrant=False)
        constants = tuple(each.detach() for each in store)
        return checkpoint(lambda h: layer(h, mask, *constants), x, use_reentrant=False)

    def forward(
        self, input_ids: Tensor, attention_mask: Tensor | None = None, labels: Tensor | None = None
    ) -> CausalLMOutput:
        """Predict the next tokens; `attention_mask` is 0 for padding."""
        steps = torch.arange(input_ids.shape[1], device=input_ids.device)
        mask = (steps[:, None] >= steps)[None]
        if attention_mask is not None:
            mask = mask & (attention_mask.bool()[:, None] | (steps[:, None] == steps))
        x = self.embed_tokens(input_ids) * self.embed_tokens.embedding_dim**0.5
        store: tuple[Tensor, ...] = ()
        for layer in self.layers:
            x, *kv = self._run(layer, x, mask[:, None], store if layer.is_shared else ())
            store = store if layer.is_shared else tuple(kv)
        logits = 30.0 * (F.linear(self.norm(x), self.embed_tokens.weight) / 30.0).tanh()
        loss = None
        if labels is not None:
            loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
        return CausalLMOutput(loss, logits)


def buggy() -> nn.Module:
    """Shared keys and values are constants in the checkpointed layers."""
    return Gemma3n(kv_as_argument=False)


def healthy() -> nn.Module:
    """Shared keys and values are arguments of the checkpointed layers."""
    return Gemma3n(kv_as_argument=True)


def declared(make: Callable[[], nn.Module]) -> ModelSpec:
    """State a causal model with full attention and a tied head."""
    return ModelSpec.of(make, causal=True, window="full", tied=True, padding_sides=("left", "right"))


def observe(model: nn.Module) -> Tensor:
    """Gradient of the source layer's keys with checkpointing, minus that without."""
    model, ids = model.double().train(), torch.tensor([[5, 9, 11, 2, 31, 44, 17]])
    weight, gradients = model.layers[1].self_attn.k_proj.weight, []
    for model.gradient_checkpointing in (True, False):
        model.zero_grad()
        model(ids, labels=ids).loss.backward()
        gradients.append(weight.grad.clone())
    model.zero_grad()
    model.gradient_checkpointing = True
    return gradients[0] - gradients[1]
