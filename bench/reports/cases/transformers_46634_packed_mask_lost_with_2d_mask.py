"""transformers#46634 (huggingface/transformers): packed documents see each other if a 2D mask is passed.

Restarts of position_ids separate the documents only while attention_mask is None; any mask turns that off.
"""

import torch
import torch.nn.functional as F
from torch import nn


def find_packed_sequence_indices(position_ids: torch.Tensor) -> torch.Tensor:
    """Number the documents of each row: a new one starts where positions do not go up by one."""
    starts = position_ids.diff(prepend=position_ids[:, :1] - 1, dim=-1) != 1
    return starts.cumsum(-1)


def create_causal_mask(
    attention_mask: torch.Tensor | None, position_ids: torch.Tensor | None, length: int, always: bool
) -> torch.Tensor:
    """True where a query may look: causal, not padding, same document."""
    mask = torch.ones(length, length, dtype=torch.bool).tril()[None, None]
    if position_ids is not None and (always or attention_mask is None):
        document = find_packed_sequence_indices(position_ids)
        mask = mask & (document[:, None, :, None] == document[:, None, None, :])
    if attention_mask is not None:
        mask = mask & attention_mask.bool()[:, None, None, :]
    return mask


class Attention(nn.Module):
    """Grouped-query attention with rotary positions."""

    def __init__(self, hidden: int, heads: int, kv_heads: int) -> None:
        super().__init__()
        self.head_dim = hidden // heads
        self.q_proj = nn.Linear(hidden, hidden, bias=False)
        self.k_proj = nn.Linear(hidden, kv_heads * self.head_dim, bias=False)
        self.v_proj = nn.Linear(hidden, kv_heads * self.head_dim, bias=False)
        self.o_proj = nn.Linear(hidden, hidden, bias=False)

    def forward(self, x: torch.Tensor, angle: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """Attend where `mask` is true."""
        q, k, v = (
            p(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
            for p in (self.q_proj, self.k_proj, self.v_proj)
        )
        q, k = self.rotate(q, angle), self.rotate(k, angle)
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)
        return self.o_proj(out.transpose(1, 2).flatten(2))

    @staticmethod
    def rotate(x: torch.Tensor, angle: torch.Tensor) -> torch.Tensor:
        """Apply rotary positions."""
        x1, x2 = x.chunk(2, dim=-1)
        cos, sin = angle.cos(), angle.sin()
        return torch.cat((x1 * cos - x2 * sin, x2 * cos + x1 * sin), dim=-1)


class LlamaForCausalLM(nn.Module):
    """Small Llama."""

    def __init__(self, always_detect: bool, vocab: int = 64, hidden: int = 32, layers: int = 2) -> None:
        super().__init__()
        self.always_detect = always_detect
        self.embed_tokens = nn.Embedding(vocab, hidden)
        self.attentions = nn.ModuleList(Attention(hidden, 4, 2) for _ in range(layers))
        self.attention_norms = nn.ModuleList(nn.RMSNorm(hidden) for _ in range(layers))
        self.norm = nn.RMSNorm(hidden)
        self.lm_head = nn.Linear(hidden, vocab, bias=False)

    def forward(
        self,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor]:
        """Return (logits,)."""
        mask = create_causal_mask(attention_mask, position_ids, input_ids.shape[1], self.always_detect)
        x = self.embed_tokens(input_ids)
        if position_ids is None:
            position_ids = torch.arange(input_ids.shape[1])[None]
        inv_freq = 10000.0 ** (-torch.arange(0, 8, 2).to(x.dtype) / 8)
        angle = position_ids[:, None, :, None].to(x.dtype) * inv_freq
        for norm, attention in zip(self.attention_norms, self.attentions, strict=True):
            x = x + attention(norm(x), angle, mask)
        return (self.lm_head(self.norm(x)),)


def buggy() -> nn.Module:
    """Looks for packed documents only without a mask."""
    return LlamaForCausalLM(always_detect=False)


def healthy() -> nn.Module:
    """Looks for packed documents whenever positions are given."""
    return LlamaForCausalLM(always_detect=True)


def observe(model: nn.Module) -> torch.Tensor:
    """Logits of two packed documents, with an all-ones mask, minus those of each alone; 0 is right."""
    model = model.double().eval()
    first, second = torch.arange(6)[None] + 3, torch.arange(5)[None] * 7 + 1
    position_ids = torch.cat((torch.arange(6), torch.arange(5)))[None]
    packed = torch.cat((first, second), dim=1)
    with torch.no_grad():
        together = model(packed, attention_mask=torch.ones_like(packed), position_ids=position_ids)[0]
        return together - torch.cat((model(first)[0], model(second)[0]), dim=1)
