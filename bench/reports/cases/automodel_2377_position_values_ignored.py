"""Automodel#2377 (NVIDIA-NeMo/Automodel): rotary angles follow how many `position_ids` there are.

Their values are ignored: positions with gaps or offsets get the angles of 0, 1, 2, ...
"""

from types import SimpleNamespace

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class LlamaRotaryEmbedding(nn.Module):
    """Gives (cos, sin) out of a table that grows when it must."""

    def __init__(self, head_dim: int, *, gather: bool) -> None:
        super().__init__()
        self.gather = gather
        rates = [10000 ** (-i / head_dim) for i in range(0, head_dim, 2)]
        # The sine of a negative angle stands for the minus of the first half.
        self.rates = [-rate for rate in rates] + rates
        self.table = torch.empty(0, head_dim)

    @torch.no_grad()
    def forward(self, x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        """Tables (batch, time, head_dim) in the dtype of `x`."""
        length = int(position_ids.max()) + 1 if self.gather else position_ids.shape[-1]
        if length > len(self.table) or self.table.device != x.device:
            at = torch.arange(length, device=x.device).double()
            self.table = at[:, None] * torch.tensor(self.rates, device=x.device, dtype=torch.float64)
        if self.gather:
            angles = self.table[position_ids]
        else:
            angles = self.table[:length].expand(position_ids.shape[0], -1, -1)
        return angles.cos().to(x.dtype), angles.sin().to(x.dtype)


class LlamaDecoderLayer(nn.Module):
    """Attention and a gated feed-forward layer, both pre-norm."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (
            nn.Linear(dim, dim, bias=False) for _ in range(4)
        )
        self.gate_proj, self.up_proj = (nn.Linear(dim, 2 * dim, bias=False) for _ in range(2))
        self.down_proj = nn.Linear(2 * dim, dim, bias=False)
        self.input_layernorm, self.post_attention_layernorm = nn.RMSNorm(dim, 1e-6), nn.RMSNorm(dim, 1e-6)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, mask: Tensor) -> Tensor:
        """`mask` is True where a query may look."""
        h = self.input_layernorm(x)
        projections = self.q_proj, self.k_proj, self.v_proj
        q, k, v = (p(h).unflatten(-1, (self.heads, -1)).transpose(1, 2) for p in projections)
        q, k = (y * cos[:, None] + y.roll(y.shape[-1] // 2, -1) * sin[:, None] for y in (q, k))
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        x = x + self.o_proj(y.transpose(1, 2).flatten(2))
        h = self.post_attention_layernorm(x)
        return x + self.down_proj(F.silu(self.gate_proj(h)) * self.up_proj(h))


class LlamaForCausalLM(nn.Module):
    """Llama with the calling convention of transformers; returns `logits`."""

    def __init__(self, vocab_size: int = 71, dim: int = 32, heads: int = 4, *, gather: bool) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(vocab_size, dim)
        self.layers = nn.ModuleList(LlamaDecoderLayer(dim, heads) for _ in range(2))
        self.norm, self.lm_head = nn.RMSNorm(dim, 1e-6), nn.Linear(dim, vocab_size, bias=False)
        self.rotary_emb = LlamaRotaryEmbedding(dim // heads, gather=gather)

    def forward(
        self, input_ids: Tensor, attention_mask: Tensor | None = None, position_ids: Tensor | None = None
    ) -> SimpleNamespace:
        """All are (batch, time), the mask is 0 at padding."""
        batch, length = input_ids.shape
        if position_ids is None:
            position_ids = torch.arange(length, device=input_ids.device).expand(batch, -1)
        mask = torch.ones(length, length, dtype=torch.bool, device=input_ids.device).tril()
        if attention_mask is not None:
            # A padded query keeps itself, so that no row is empty.
            itself = torch.eye(length, dtype=torch.bool, device=input_ids.device)
            mask = ((mask & attention_mask.bool()[:, None]) | itself)[:, None]
        x = self.embed_tokens(input_ids)
        cos, sin = self.rotary_emb(x, position_ids)
        for layer in self.layers:
            x = layer(x, cos, sin, mask)
        return SimpleNamespace(logits=self.lm_head(self.norm(x)))


def buggy() -> nn.Module:
    """Slices the table by length."""
    return LlamaForCausalLM(gather=False)


def healthy() -> nn.Module:
    """Looks every position up."""
    return LlamaForCausalLM(gather=True)


def observe(model: nn.Module) -> Tensor:
    """A text with a hole of masked tokens, minus the text without them and with the same positions."""
    model.eval()
    ids = torch.randint(0, 71, (2, 11), generator=torch.Generator().manual_seed(1))
    kept = torch.tensor([0, 1, 2, 6, 7, 9, 10])
    keep = torch.zeros_like(ids).index_fill(1, kept, 1)
    with torch.no_grad():
        whole = model(ids, attention_mask=keep).logits[:, kept]
        return whole - model(ids[:, kept], position_ids=kept.expand(2, -1)).logits
