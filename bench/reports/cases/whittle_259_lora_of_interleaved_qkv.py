"""whittle#259 (whittle-org/whittle): LoRA of the fused projection writes to the rows of other heads.

The rows of the weight are interleaved: the queries, the key and the value of the first group, then those of
the next group. The update is placed as if all queries came first, then all keys, then all values.
"""

import math
from collections.abc import Callable
from itertools import chain

import torch
import torch.nn.functional as F
from torch import nn

from stackwise import Facts, ModelSpec

N_EMBD, N_HEAD, N_QUERY_GROUPS, HEAD_SIZE = 32, 4, 2, 8
Q_PER_KV = N_HEAD // N_QUERY_GROUPS


def qkv_rows(*, interleaved: bool) -> tuple[list[int], list[int], list[int]]:
    """Return the rows of queries, keys and values in the fused weight."""
    kinds = ["q"] * N_HEAD + ["k"] * N_QUERY_GROUPS + ["v"] * N_QUERY_GROUPS
    if interleaved:
        kinds = (["q"] * Q_PER_KV + ["k", "v"]) * N_QUERY_GROUPS
    q, k, v = (
        [i * HEAD_SIZE + j for i, kind in enumerate(kinds) if kind == name for j in range(HEAD_SIZE)]
        for name in "qkv"
    )
    return q, k, v


class LoRAQKVLinear(nn.Module):
    """Frozen fused projection, with an update of queries, keys or values."""

    def __init__(
        self, enable_lora: tuple[bool, bool, bool], r: int, lora_alpha: int, *, interleaved: bool
    ) -> None:
        super().__init__()
        self.linear = nn.Linear(N_EMBD, (N_HEAD + 2 * N_QUERY_GROUPS) * HEAD_SIZE, bias=False)
        rows = zip(qkv_rows(interleaved=interleaved), enable_lora, strict=True)
        enabled = [each for each, is_enabled in rows if is_enabled]
        self.qkv_shapes, self.scaling, self.merged = [len(each) for each in enabled], lora_alpha / r, False
        self.register_buffer("lora_ind", torch.tensor([*chain(*enabled)]), persistent=False)
        self.lora_A = nn.Parameter(torch.empty(r * len(enabled), N_EMBD))
        self.lora_B = nn.Parameter(torch.zeros(sum(self.qkv_shapes), r))
        nn.init.kaiming_uniform_(self.lora_A, a=math.sqrt(5))

    def get_lora_AB(self) -> torch.Tensor:
        """Return the update of the fused weight."""
        parts = zip(self.lora_B.split(self.qkv_shapes), self.lora_A.chunk(len(self.qkv_shapes)), strict=True)
        update = torch.cat([b @ a for b, a in parts]) * self.scaling
        return torch.zeros_like(self.linear.weight).index_copy(0, self.lora_ind, update)

    @torch.no_grad()
    def merge(self) -> None:
        """Add the update to the frozen weight."""
        if not self.merged:
            self.linear.weight += self.get_lora_AB()
            self.merged = True

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return queries, keys and values, interleaved."""
        return self.linear(x) if self.merged else F.linear(x, self.linear.weight + self.get_lora_AB())


def apply_rope(x: torch.Tensor) -> torch.Tensor:
    """Rotate (batch, heads, time, head_size)."""
    half = x.shape[-1] // 2
    freqs = 10000.0 ** (-torch.arange(half, device=x.device, dtype=x.dtype) / half)
    angles = torch.arange(x.shape[2], device=x.device, dtype=x.dtype)[:, None] * freqs
    a, b = x.chunk(2, dim=-1)
    return torch.cat([a * angles.cos() - b * angles.sin(), b * angles.cos() + a * angles.sin()], dim=-1)


class Block(nn.Module):
    """Attention with groups of queries, and a gated MLP."""

    def __init__(self, *, interleaved: bool) -> None:
        super().__init__()
        self.norm_1, self.norm_2 = nn.RMSNorm(N_EMBD), nn.RMSNorm(N_EMBD)
        self.qkv = LoRAQKVLinear((True, False, True), r=4, lora_alpha=8, interleaved=interleaved)
        self.proj = nn.Linear(N_EMBD, N_EMBD, bias=False)
        self.fc_1, self.fc_2 = nn.Linear(N_EMBD, 64, bias=False), nn.Linear(N_EMBD, 64, bias=False)
        self.mlp_proj = nn.Linear(64, N_EMBD, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Apply the layer to (batch, time, n_embd)."""
        qkv = self.qkv(self.norm_1(x)).unflatten(-1, (N_QUERY_GROUPS, Q_PER_KV + 2, HEAD_SIZE))
        q, k, v = (y.flatten(2, 3).transpose(1, 2) for y in qkv.split((Q_PER_KV, 1, 1), dim=3))
        y = F.scaled_dot_product_attention(apply_rope(q), apply_rope(k), v, is_causal=True, enable_gqa=True)
        x = x + self.proj(y.transpose(1, 2).flatten(2))
        y = self.norm_2(x)
        return x + self.mlp_proj(F.silu(self.fc_1(y)) * self.fc_2(y))


class GPT(nn.Module):
    """Language model in which only the updates are trained."""

    def __init__(self, *, interleaved: bool, vocab_size: int = 72) -> None:
        super().__init__()
        self.wte = nn.Embedding(vocab_size, N_EMBD)
        self.h = nn.ModuleList(Block(interleaved=interleaved) for _ in range(2))
        self.ln_f, self.lm_head = nn.RMSNorm(N_EMBD), nn.Linear(N_EMBD, vocab_size, bias=False)
        for name, parameter in self.named_parameters():
            parameter.requires_grad_("lora_" in name)

    def merge_lora_weights(self) -> None:
        """Merge all updates."""
        for block in self.h:
            block.qkv.merge()

    def forward(self, idx: torch.Tensor) -> torch.Tensor:
        """Return logits."""
        x = self.wte(idx)
        for block in self.h:
            x = block(x)
        return self.lm_head(self.ln_f(x))


def buggy() -> nn.Module:
    """Queries, keys and values one after the other."""
    return GPT(interleaved=False)


def healthy() -> nn.Module:
    """The rows of each group."""
    return GPT(interleaved=True)


_FROZEN = ("norm_1", "norm_2", "qkv.linear", "proj", "fc_1", "fc_2", "mlp_proj")
FROZEN = ("wte", "ln_f", "lm_head", *(f"h.{i}.{name}" for i in range(2) for name in _FROZEN))


def declared(make: Callable[[], nn.Module]) -> ModelSpec:
    """State a causal model whose base is trained and frozen."""
    facts = Facts(key_heads=N_QUERY_GROUPS)
    return ModelSpec.of(make, causal=True, frozen=FROZEN, trained=True, facts=facts)


@torch.no_grad()
def observe(model: nn.Module) -> torch.Tensor:
    """Return the change of the keys by an update of queries and values."""
    qkv, generator = model.h[0].qkv, torch.Generator().manual_seed(1)
    x = torch.randn(1, 5, N_EMBD, generator=generator)
    qkv.lora_B.copy_(torch.randn(qkv.lora_B.shape, generator=generator))
    change = (qkv(x) - qkv.linear(x)).unflatten(-1, (N_QUERY_GROUPS, Q_PER_KV + 2, HEAD_SIZE))
    return change[..., Q_PER_KV, :]
