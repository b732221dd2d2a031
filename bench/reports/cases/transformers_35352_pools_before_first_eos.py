"""transformers#35352 (huggingface/transformers): the classifier pools the token before a row's first pad id.

With the end token as pad token, as is common for Llama, a prompt that contains end tokens is pooled at its
first turn and everything after that is ignored.
"""

from types import SimpleNamespace

import torch
import torch.nn.functional as F
from torch import nn

EOS = 2
DECLARATION = "the score is read at the last token of the row that is not the pad token"


def rotate(x: torch.Tensor, angle: torch.Tensor) -> torch.Tensor:
    """Rotary embedding of (B, heads, T, head_dim), half-split."""
    a, b = x.chunk(2, dim=-1)
    return x * angle.cos().to(x.dtype) + torch.cat((-b, a), dim=-1) * angle.sin().to(x.dtype)


class LlamaDecoderLayer(nn.Module):
    """Pre-norm grouped-query attention and SwiGLU."""

    def __init__(self, dim: int, head_dim: int, kv_heads: int) -> None:
        super().__init__()
        self.head_dim = head_dim
        self.q_proj, self.o_proj = nn.Linear(dim, dim, bias=False), nn.Linear(dim, dim, bias=False)
        self.k_proj, self.v_proj = (nn.Linear(dim, kv_heads * head_dim, bias=False) for _ in range(2))
        self.input_layernorm, self.post_attention_layernorm = nn.RMSNorm(dim), nn.RMSNorm(dim)
        self.gate_proj, self.up_proj = (nn.Linear(dim, 2 * dim, bias=False) for _ in range(2))
        self.down_proj = nn.Linear(2 * dim, dim, bias=False)

    def forward(self, x: torch.Tensor, mask: torch.Tensor, angle: torch.Tensor) -> torch.Tensor:
        """One layer; `mask` is True where attention is allowed."""
        h = self.input_layernorm(x)
        heads = (p(h).unflatten(-1, (-1, self.head_dim)) for p in (self.q_proj, self.k_proj, self.v_proj))
        q, k, v = (t.transpose(1, 2) for t in heads)
        a = F.scaled_dot_product_attention(rotate(q, angle), rotate(k, angle), v, mask, enable_gqa=True)
        x = x + self.o_proj(a.transpose(1, 2).flatten(2))
        h = self.post_attention_layernorm(x)
        return x + self.down_proj(F.silu(self.gate_proj(h)) * self.up_proj(h))


class LlamaForSequenceClassification(nn.Module):
    """Llama with a score per class."""

    def __init__(self, first_pad: bool, num_labels: int = 3, vocab: int = 64, dim: int = 32) -> None:
        super().__init__()
        self.first_pad, self.pad_token_id, self.head_dim = first_pad, EOS, 8
        self.embed_tokens = nn.Embedding(vocab, dim)
        self.layers = nn.ModuleList(LlamaDecoderLayer(dim, self.head_dim, 2) for _ in range(2))
        self.norm = nn.RMSNorm(dim)
        self.score = nn.Linear(dim, num_labels, bias=False)

    def forward(
        self,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        labels: torch.Tensor | None = None,
    ) -> SimpleNamespace:
        """Class logits (B, num_labels), and the loss when labels are given."""
        B, T = input_ids.shape
        columns = torch.arange(T, device=input_ids.device)
        position_ids = columns[None] if position_ids is None else position_ids
        freqs = 10000.0 ** -(torch.arange(0, self.head_dim, 2, device=columns.device) / self.head_dim)
        angle = (position_ids[:, None, :, None] * freqs).repeat(1, 1, 1, 2)
        mask = (columns[:, None] >= columns)[None, None]
        if attention_mask is not None:
            # Padding may look at itself, or its softmax would have no entry.
            mask = mask & (attention_mask.bool()[:, None, None] | (columns[:, None] == columns))
        x = self.embed_tokens(input_ids)
        for layer in self.layers:
            x = layer(x, mask, angle)
        logits = self.score(self.norm(x))
        if self.first_pad:
            last = (input_ids == self.pad_token_id).int().argmax(-1) - 1
        else:
            last = (columns * (input_ids != self.pad_token_id)).argmax(-1)
        pooled = logits[torch.arange(B, device=last.device), last]
        loss = None if labels is None else F.cross_entropy(pooled, labels)
        return SimpleNamespace(loss=loss, logits=pooled)


def buggy() -> nn.Module:
    """As reported."""
    return LlamaForSequenceClassification(first_pad=True)


def healthy() -> nn.Module:
    """As fixed."""
    return LlamaForSequenceClassification(first_pad=False)


def observe(model: nn.Module) -> torch.Tensor:
    """Logits of padded chats of two turns minus the score at the last token of each, found by hand."""
    ids = torch.tensor([[5, 9, EOS, 7, 30, 11, EOS, EOS], [5, 8, 40, EOS, 7, EOS, EOS, EOS]])
    mask = torch.tensor([[1, 1, 1, 1, 1, 1, 1, 0], [1, 1, 1, 1, 1, 1, 0, 0]])
    hidden: list[torch.Tensor] = []
    hook = model.norm.register_forward_hook(lambda _m, _i, out: hidden.append(out))
    logits = model(ids, attention_mask=mask).logits
    hook.remove()
    return logits - model.score(torch.stack((hidden[0][0, 5], hidden[0][1, 4])))
